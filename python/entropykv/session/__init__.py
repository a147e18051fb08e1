"""Run one text in one budget: decoding, generation, recovery, files of sessions."""
