"""Scores → ranks → metrics → report, by the same rules for the model and for the baselines."""
