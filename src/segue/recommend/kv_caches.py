"""What is remembered of users who are asked about again and again, in bounded memory: the way from windows to questions
that costs a token for each new event."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from segue.data.batch import Batch, take
from segue.layers.packed import tensors
from segue.models.kv_cache import IncrementalEncoder, KVCache, window_of
from segue.models.sequence import SequenceModel

MEGABYTE = 1_000_000
LEAST_EVENTS = 16  # of a window: a shorter one, encoded among others, takes no longer
RECENT = 4096  # users asked about last: of whom is asked about once in a while, nothing is worth keeping


class KVCaches:
    """Of the users of one model, those used longest ago forgotten first. For one thread at a time.

    A model that cannot be continued encodes every window whole, and so does a bound of 0.
    """

    def __init__(self, model: SequenceModel, *, most_bytes: int) -> None:
        self.bytes = 0
        self._extended = self._whole = 0  # questions for which what is new was encoded, or the whole window
        self._model = model
        self.most_bytes = most_bytes
        self._continuation = IncrementalEncoder(model) if most_bytes and model.incremental else None
        self._memories: OrderedDict[str, KVCache] = OrderedDict()
        self._recent: OrderedDict[int, None] = OrderedDict()  # hashes: who is forgotten leaves no name here

    @property
    def users(self) -> list[str]:
        """Who is remembered, those used longest ago first."""
        return list(self._memories)

    def follow(self, model: SequenceModel) -> None:
        """Encode with this model, which reads every item as the one before does and knows more of them: what is
        remembered stays true. Questions under way may be asked by either."""
        self._model = model
        self._continuation = None if self._continuation is None else IncrementalEncoder(model)

    def queries(self, windows: Batch, users: Sequence[str | None]) -> Tensor:
        """What is asked after each window [B, Q], as `SequenceModel.query` has it."""
        if self._continuation is None:
            self._whole += len(users)
            return self._model.query(tensors(windows))
        found = self._brought_up(windows, users, self._continuation)
        self._extended += len(found)
        self._whole += len(users) - len(found)
        with torch.inference_mode():
            if not found:
                return self._encoded(windows, users, self._continuation)
            questions = torch.empty(len(users), len(next(iter(found.values()))))
            questions[list(found)] = torch.from_numpy(np.stack(list(found.values())))
            rest = [row for row in range(len(users)) if row not in found]
            if rest:
                others = [users[row] for row in rest]
                questions[rest] = self._encoded(take(windows, np.array(rest)), others, self._continuation)
            return questions

    def counted(self) -> tuple[int, int]:
        """Questions for which what is new was encoded, and those for which the whole window was, since the last call
        of this."""
        counts = self._extended, self._whole
        self._extended = self._whole = 0
        return counts

    def forget(self, user: str) -> None:
        """Keep nothing of a user."""
        self._recent.pop(hash(user), None)
        self._drop(user)

    def _brought_up(
        self, windows: Batch, users: Sequence[str | None], continuation: IncrementalEncoder
    ) -> dict[int, np.ndarray]:
        """The questions [Q] of the rows whose users' memories could be brought up to their windows."""
        found: dict[int, np.ndarray] = {}
        for row, user in enumerate(users):
            memory = None if user is None else self._memories.get(user)
            if user is None or memory is None:
                continue
            before = memory.size
            question = continuation.extend(memory, window_of(windows, row))
            self.bytes += memory.size - before
            if question is None:
                self._drop(user)
                self._asked_lately(user)
            else:
                self._memories.move_to_end(user)
                found[row] = question
        self._keep_the_bound()
        return found

    def _encoded(self, windows: Batch, users: Sequence[str | None], continuation: IncrementalEncoder) -> Tensor:
        """Whole windows; of the users who were asked about lately the outcome is kept."""
        kept = {
            row: user
            for row, (user, length) in enumerate(zip(users, windows.lengths.tolist(), strict=True))
            if user is not None and length >= LEAST_EVENTS and self._asked_lately(user)
        }
        if not kept:
            return self._model.query(tensors(windows))
        questions, memories = continuation.encode(windows, list(kept))
        for user, memory in zip(kept.values(), memories, strict=True):
            self._drop(user)
            self._memories[user] = memory
            self.bytes += memory.size
        self._keep_the_bound()
        return questions

    def _asked_lately(self, user: str) -> bool:
        key = hash(user)
        lately = key in self._recent
        self._recent[key] = None
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return lately

    def _keep_the_bound(self) -> None:
        while self.bytes > self.most_bytes:
            self._drop(next(iter(self._memories)))

    def _drop(self, user: str) -> None:
        memory = self._memories.pop(user, None)
        if memory is not None:
            self.bytes -= memory.size
