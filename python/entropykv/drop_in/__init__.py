"""Give llama-cpp-python's interface a budget: EntropyLlama, attach and detach."""
