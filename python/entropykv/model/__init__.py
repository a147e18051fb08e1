"""Read model files without loading them: header, geometry, identity, and the shipped models."""
