"""The interface of llama-cpp-python: EntropyLlama, attach and detach."""
