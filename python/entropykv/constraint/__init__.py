"""Say which tokens may follow: JSON schemas, regular expressions and grammars, by llguidance."""
