"""Run the same weights and texts through the KV cache eviction of other frameworks and of
entropykv.

The command is `python -m benchmarks.peers`, from the root of the repository.
"""
