"""Serve the page at /, and show what the cache holds."""
