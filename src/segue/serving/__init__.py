"""A run folder as a live HTTP service: `service` calls the engine and the store, `http` is its interface.

Nothing is imported here: the engine's process must not load the HTTP side, nor the HTTP process torch.
"""
