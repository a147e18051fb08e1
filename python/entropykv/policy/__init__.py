"""Who keeps what: names, importance, shares, budgets that follow the text. Pure."""
