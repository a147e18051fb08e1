"""Hold K and V: the base class of stores, the headwise and the flat store, and cold storage."""
