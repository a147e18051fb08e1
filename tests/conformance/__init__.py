"""Check what schemas of the JSON-Schema-Test-Suite are refused or enforced wrongly: __main__.py."""
