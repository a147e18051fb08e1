"""Offer llama-cpp-python's interface inside a budget: EntropyLlama, attach and detach."""
