"""Run the same weights and texts through the KV cache eviction of other frameworks and of
entropykv.

Run it as `python -m benchmarks.peers` from the root of the repository.
"""
