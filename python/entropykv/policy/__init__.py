"""Decide which entries are kept, without side effects: names, importance, shares, online
budgets.
"""
