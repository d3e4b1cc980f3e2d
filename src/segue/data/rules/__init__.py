"""Which rows are good, and what happens to the others."""
