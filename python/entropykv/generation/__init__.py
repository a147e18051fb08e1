"""Answer prompts: from messages or text to the events of an answer, in the same way for the
commands, the server and EntropyLlama.
"""
