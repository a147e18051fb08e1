"""Define entropy profiles: their values, their file, their loss curves, and how to find one."""
