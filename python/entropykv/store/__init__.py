"""Hold K and V: the protocol of stores, the headwise and the flat store, and cold storage."""
