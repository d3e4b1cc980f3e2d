"""Samplers of negatives."""
