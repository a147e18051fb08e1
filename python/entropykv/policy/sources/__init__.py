"""Implement what two of the three source documents prescribe, one file each: see
docs/background/sources.md. What the third one prescribes is set in settings/freezing.py.
"""
