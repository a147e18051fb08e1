"""Entropy profiles: values, file, curves, and the search for one."""
