"""The HTTP interface: routes, bodies, problems, keys, limits, logs, metrics, and the server that runs them."""
