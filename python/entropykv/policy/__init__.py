"""Decide who keeps what, without side effects: names, importance, shares, online budgets."""
