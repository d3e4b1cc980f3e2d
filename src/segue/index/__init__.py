"""Item vectors → best items. `search` says what an index does, `exact` is the reference."""
