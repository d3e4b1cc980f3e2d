"""How answers are looked up, in numbers."""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.errors import SettingsError


class IndexSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `index` of the settings."""

    kind: Literal["exact"] = "exact"
    """Exact: every item is scored."""
    chunk: int = 65536
    """Items scored at a time. It bounds memory and changes no answer."""

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise SettingsError(f"index.chunk must be at least 1, got {self.chunk}.")
