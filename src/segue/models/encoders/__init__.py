"""One encoder a file."""
