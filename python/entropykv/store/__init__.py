"""The stores of K and V: their protocol, headwise, flat, and cold storage."""
