"""Item tables: by id, by category, by codes, by content."""
