"""The HTTP side: routes, keys, limits, logs, metrics."""
