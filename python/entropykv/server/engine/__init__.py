"""Let workers use a model: admission, the prefix cache, conversations on disk."""
