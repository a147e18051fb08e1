"""Implement what the three source documents prescribe, one file each:
docs/background/sources.md.
"""
