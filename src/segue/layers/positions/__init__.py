"""Positions and times of tokens."""
