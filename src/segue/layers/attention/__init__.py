"""Scores, weights and the attention built from them."""
