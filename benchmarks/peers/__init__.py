"""The same weights and texts through other frameworks' KV cache eviction, and through entropykv.

Run it as `python -m benchmarks.peers` from the root of the repository.
"""
