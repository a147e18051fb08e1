"""What a user can say, checked once and frozen."""
