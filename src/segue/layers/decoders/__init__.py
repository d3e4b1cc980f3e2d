"""Decoders, which continue encoded histories item by item."""
