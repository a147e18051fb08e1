"""Turn measured results into reports: figures, tables, and a page with both."""
