"""Reports of what was measured: figures, tables, and a page of both."""
