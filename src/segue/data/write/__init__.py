"""Compact events, sorted and written as the files of a data folder."""
