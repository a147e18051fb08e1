"""Measure what a budget costs: quality and speed of budgeted sessions against the full cache."""
