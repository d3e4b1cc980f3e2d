"""A data folder and settings → a run folder: `begin` or `resume`, train, `measure`, `write`; `make` is the order."""
