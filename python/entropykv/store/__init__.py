"""Hold K and V: the protocol of stores, the headwise and the flat one, and cold storage."""
