"""Training events → what followed what: item-to-item counts, and what they add to a model's scores."""
