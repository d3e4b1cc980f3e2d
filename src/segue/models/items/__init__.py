"""Item tables: by id, by category, by content, by codes. `ItemSettings` is the choice among them."""

from __future__ import annotations

from segue.models.items.coded import CodeSettings
from segue.models.items.content import IdVectorSettings, VectorSettings
from segue.models.items.tables import CategorySettings, IdSettings

ItemSettings = IdSettings | CodeSettings | VectorSettings | IdVectorSettings | CategorySettings
