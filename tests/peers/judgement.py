"""Say which of llama.cpp's server tests entropykv is meant to fail, and why."""

from __future__ import annotations

FILES = (
    *("test_basic", "test_completion", "test_chat_completion", "test_template", "test_tokenize"),
    *("test_security", "test_ctx_shift", "test_ignore_eos", "test_infill", "test_speculative"),
    *("test_tool_call", "test_compat_oai_responses", "test_compat_anthropic", "test_slot_save"),
    "test_metrics",
)
"""The files that concern what entropykv serves."""

NOT_RUN: dict[str, str] = {}

DIFFERENCES: tuple[tuple[str, str], ...] = ()
"""Patterns of tests, as FILE.py::TEST, each with the reason for the difference."""
