"""Check the values that a user can give once, and freeze them."""
