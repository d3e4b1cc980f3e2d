"""Item vectors → best items. `search` defines the interface, `exact` is the reference implementation."""
