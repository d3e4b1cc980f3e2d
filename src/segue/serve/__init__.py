"""A run folder as a live HTTP service: `service` does the work, `app` is its HTTP face, `server` runs it."""

from __future__ import annotations

from segue.serve.app import create_app
from segue.serve.server import fill_histories, serve
from segue.serve.settings import ServiceSettings

__all__ = ["ServiceSettings", "create_app", "fill_histories", "serve"]
