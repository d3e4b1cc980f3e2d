"""Attention: scores of queries and keys, weights from scores, and the modules that mix values."""
