"""Hold K and V: what all stores do, the headwise and the flat one, and cold storage."""
