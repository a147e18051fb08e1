"""Read a model file that is not loaded: header, geometry, identity, and the shipped models."""
