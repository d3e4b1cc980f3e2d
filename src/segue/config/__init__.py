"""Recipes and `--set` → settings: the sections of all packages, checked when they are read."""
