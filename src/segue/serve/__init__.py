"""A run folder as an HTTP service. `app` is the application, `server` runs it."""
