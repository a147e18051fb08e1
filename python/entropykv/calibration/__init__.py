"""Measure what a model's heads attend to: entropies of query heads, and what a KV head loses."""

from entropykv.calibration.measure import CalibrationSettings, calibrate
from entropykv.calibration.texts import Text, read_texts

__all__ = ["CalibrationSettings", "Text", "calibrate", "read_texts"]
