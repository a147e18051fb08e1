"""Let workers use a model: admission, the texts it holds, conversations on disk."""
