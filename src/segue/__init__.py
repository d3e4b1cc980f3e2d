"""segue turns an event log into live, explained next-item recommendations.

    data = segue.prepare("events.csv")
    model = segue.train(data)
    model.recommend(["espresso", "grinder"], k=10)

`import segue` is light: torch comes with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segue.api import Data, Recommender, Report, add_items, compare, embed, evaluate, load, prepare, train

__all__ = ["Data", "Recommender", "Report", "add_items", "compare", "embed", "evaluate", "load", "prepare", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        globals()[name] = value = getattr(import_module("segue.api"), name)
        return value
    raise AttributeError(f"module 'segue' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
