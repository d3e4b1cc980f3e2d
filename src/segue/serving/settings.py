"""How a service is started, in one struct that worker processes can be handed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from segue.errors import InputError
from segue.serving.http.guard import read_origin
from segue.serving.http.limits import RateLimit
from segue.serving.http.logs import Level, check_level

STORE = "segue.sqlite"  # in the folder one stands in


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `segue serve` was told."""

    runs: tuple[Path, ...]
    """The runs to serve: one, or two side by side."""
    runs_folder: Path | None = None
    """Runs that may be switched to while serving."""
    store: str = STORE
    host: str = "127.0.0.1"
    workers: int = 1
    cache_mb: int = 256
    """Megabytes in which each worker may remember encoded histories, so that a new event costs one token."""
    keys: Path | None = None
    rate_limit: float | None = None
    """Requests a second that one client may send."""
    origins: tuple[str, ...] = ()
    """Other sites whose pages may ask."""
    log_level: Level = "info"
    joining: bool = False
    """Whether the service is running already, and a process of it is started, or started again: what it was told to
    begin with is then no wish any more."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.runs) <= 2:
            raise InputError(f"Serve one run, or two to set them side by side; got {len(self.runs)}.")
        if self.workers < 1:
            raise InputError(f"--workers must be at least 1, got {self.workers}.")
        if self.cache_mb < 0:
            raise InputError(f"--cache-mb must be at least 0, which remembers nothing, got {self.cache_mb}.")
        if self.runs_folder is not None and not self.runs_folder.is_dir():
            raise InputError(f"--runs must name a folder that holds run folders; {self.runs_folder} is none.")
        # Said here, before anything is started, and not by every process later.
        check_level(self.log_level)
        if self.rate_limit is not None:
            RateLimit(self.rate_limit)
        for origin in self.origins:
            read_origin(origin)
