"""Provide what several tests use; README.md lists the modules."""
