"""Read documents once, and answer questions about them."""
