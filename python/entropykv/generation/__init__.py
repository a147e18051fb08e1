"""Answer prompts: from messages or text to the events of an answer, the same way for every door."""
