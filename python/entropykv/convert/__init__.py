"""Convert BitNet models to GGUF files that stock llama.cpp loads."""

from entropykv.convert.conversion import ConversionSummary, convert

__all__ = ["ConversionSummary", "convert"]
