"""Tell what a model thinks before it answers from its answer, and bound how long it thinks."""
