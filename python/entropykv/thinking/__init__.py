"""Separate a model's thoughts from its answer, and limit the length of thoughts."""
