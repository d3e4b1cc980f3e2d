"""A run folder as an HTTP service. `app` is the application, `server` runs it."""

from __future__ import annotations

from segue.serve.app import create_app
from segue.serve.server import serve

__all__ = ["create_app", "serve"]
