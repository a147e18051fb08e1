"""Define the values that a user can set; each is checked once, and immutable."""
