"""Measure what a budget costs: quality of a session under a budget against the full cache."""
