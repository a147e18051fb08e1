"""Convert 1.58-bit models to GGUF files that stock llama.cpp loads."""

from entropykv.convert.conversion import ConversionSummary, convert

__all__ = ["ConversionSummary", "convert"]
