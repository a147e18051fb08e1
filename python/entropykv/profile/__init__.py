"""Hold entropy profiles: values, file, curves, and the search for one."""
