"""Batch jobs over the users of a log: recommendations and embeddings, in this process or on Spark."""
