"""Freeze and restore on a schedule instead of evicting: Metinov et al.

Adilet Metinov, Gulida M. Kudakeeva, Bolotbek uulu Nursultan, Gulnara D. Kabaeva: *Adaptive Soft
Rolling KV Freeze with Entropy-Guided Recovery: Sublinear Memory Growth for Efficient LLM
Inference*. Section 3 detects entries with a low mean |q.k| and freezes them for floor(sqrt(c) / k)
steps: the parameters are fields of settings/freezing.py, the schedule is cpp/decide/freezing.cpp.
Section 3.6 restores them when the output becomes uncertain: the parameters are fields of
settings/recovery.py, the ladder is session/recovery.py.
"""

from __future__ import annotations

from entropykv.policy.policy import Importance, Policy

ROLLING_FREEZE = Policy(
    "rolling-freeze",
    "ASR-KF-EGR's schedule: what gets less attention than a share of the mean is "
    "frozen, each time for longer, and comes back by itself "
    "(rolling-freeze:products: less |q.k| than a threshold, as in its paper)",
    Importance("attention", ()),
    schedule=True,
)
