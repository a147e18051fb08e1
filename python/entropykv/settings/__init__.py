"""Values that a user can give, checked once and frozen."""
