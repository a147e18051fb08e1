"""Find out how much of a text was read before."""

from __future__ import annotations

from collections.abc import Sequence

_STRETCH = 256
"""Tokens of two texts that are compared at once."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    n = min(len(first), len(second))
    for begin in range(0, n, _STRETCH):
        one, other = first[begin : begin + _STRETCH], second[begin : begin + _STRETCH]
        if one != other:  # lists are compared at once, many tokens in the time of one
            for index in range(min(len(one), len(other))):
                if one[index] != other[index]:
                    return begin + index
    return n
