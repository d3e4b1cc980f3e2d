"""Positions and times of tokens: embeddings, relative positions, periods, time buckets."""
