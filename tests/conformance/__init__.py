"""Compare JSON schemas with the JSON-Schema-Test-Suite: see __main__.py."""
