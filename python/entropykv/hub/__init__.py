"""Fetch models of the Hugging Face Hub by name, as `-hf` and from_pretrained() do."""

from entropykv.hub.fetching import fetch_model

__all__ = ["fetch_model"]
