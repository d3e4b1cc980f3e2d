"""Scores → ranks → metrics → report, for the model and for the baselines, by one ruler."""
