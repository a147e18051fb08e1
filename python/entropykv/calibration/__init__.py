"""Measure attention in a model: entropies of query heads, and what KV heads lose by eviction."""

from entropykv.calibration.measure import CalibrationSettings, calibrate
from entropykv.evaluation.texts import Text, read_texts

__all__ = ["CalibrationSettings", "Text", "calibrate", "read_texts"]
