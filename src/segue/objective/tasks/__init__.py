"""Tasks: a batch of histories to queries and targets."""
