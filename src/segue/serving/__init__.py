"""A run folder as a live HTTP service: `service` does the work, `app` is its HTTP face, `server` runs it.

Nothing is imported here: the engine's process needs no HTTP, and that of HTTP no torch.
"""
