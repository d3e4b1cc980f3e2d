"""Recipes and `--set` → settings: the sections of every room, checked when they are read."""
