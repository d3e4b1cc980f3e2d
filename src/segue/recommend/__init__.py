"""Ids in, ids out. `recommender` answers histories, `batch` answers a file of users."""
