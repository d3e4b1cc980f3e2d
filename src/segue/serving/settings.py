"""The settings of `segue serve`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec

from segue.errors import InputError
from segue.serving.http.guard import RateLimit, read_origin
from segue.serving.http.logs import Level

STORE = "segue.sqlite"  # in the current folder


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `segue serve`, as a struct that can be sent to its worker processes."""

    runs: tuple[Path, ...]
    """The runs to serve: one, or two side by side."""
    runs_folder: Path | None = None
    """The folder of the runs that can be switched to."""
    store: str = STORE
    host: str = "127.0.0.1"
    workers: int = 1
    cache_mb: int = 256
    """Megabytes of each worker's KV cache, with which a user's new event costs one token to encode."""
    keys: Path | None = None
    rate_limit: float | None = None
    """Requests a second allowed to one client."""
    origins: tuple[str, ...] = ()
    """Origins of other sites whose pages may send requests."""
    log_level: Level = "info"
    joining: bool = False
    """Whether a process joins a running service: a worker, or a restarted engine. It serves the store's active run,
    and does not switch to the first of `runs`."""

    def __post_init__(self) -> None:
        """Check everything before the first process starts."""
        if not 1 <= len(self.runs) <= 2:
            raise InputError(f"Give one run to serve, or two to compare side by side; got {len(self.runs)}.")
        if self.workers < 1:
            raise InputError(f"--workers must be at least 1, got {self.workers}.")
        if self.cache_mb < 0:
            raise InputError(f"--cache-mb must be at least 0, which caches nothing, got {self.cache_mb}.")
        if self.runs_folder is not None and not self.runs_folder.is_dir():
            raise InputError(f"--runs must be a folder with run folders in it; {self.runs_folder} is not a folder.")
        if self.log_level not in get_args(Level):
            raise InputError(f"--log-level must be one of {', '.join(get_args(Level))}, got {self.log_level!r}.")
        if self.rate_limit is not None:
            RateLimit(self.rate_limit)
        for origin in self.origins:
            read_origin(origin)
