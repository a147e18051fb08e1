"""Measure what a budget costs: the quality and speed of budgeted sessions against the full
cache.
"""
