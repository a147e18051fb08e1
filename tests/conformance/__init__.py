"""Check which schemas of the JSON-Schema-Test-Suite are refused or enforced wrongly: see
__main__.py.
"""
