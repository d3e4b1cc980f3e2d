"""Tasks: a batch of histories → inputs and targets. `AnyTaskSettings` is the choice among them."""

from __future__ import annotations

from segue.objective.tasks.actions import AllAction, DenseAllAction, NextAction
from segue.objective.tasks.continuation import Continuation
from segue.objective.tasks.masked_item import MaskedItem
from segue.objective.tasks.next_item import NextItem
from segue.objective.tasks.recency import Recency

AnyTaskSettings = NextItem | MaskedItem | Recency | Continuation | DenseAllAction | AllAction | NextAction
