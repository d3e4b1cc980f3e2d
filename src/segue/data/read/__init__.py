"""Files or tables in, blocks of columns out, with the role of each column and one unit of time."""
