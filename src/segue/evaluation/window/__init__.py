"""Evaluation over the days after a timestamp."""
