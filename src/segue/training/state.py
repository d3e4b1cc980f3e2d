"""Unfinished training on disk: one safetensors file an epoch, replaced whole, from which training goes on exactly.

It holds the weights, their average, the best weights so far, the optimiser's moments, what the objective has counted,
and both random states; what is no tensor travels as JSON in the file's own header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from segue.errors import FolderError
from segue.folders import explained_writing
from segue.training.optimiser import average_into, memory_at
from segue.training.settings import TrainSettings
from segue.training.sparse_rows import RowSteps, take_sparse_gradients

HEADER = "segue"


class TrainingRecord(msgspec.Struct, kw_only=True):
    """What is known at the end of an epoch, tensors aside."""

    epoch: int = 0
    step: int = 0
    best_epoch: int = 0
    best_score: float = -1.0
    history: list[dict[str, float | int]] = []
    seconds: list[float] = []
    """Training time of each epoch, validation aside. Not in the history: that must be repeatable."""
    numpy_state: str = ""


class TrainingState:
    """Everything that changes while training."""

    def __init__(
        self, model: nn.Module, adamw: torch.optim.AdamW, *, seed: int, counted: Mapping[str, Tensor] | None = None
    ) -> None:
        """`counted`: what else changes in place while training, by name."""
        self.model = model
        self.adamw = adamw
        self.counted = counted or {}
        self.average = [parameter.detach().clone() for parameter in model.parameters()]
        self.best = [parameter.detach().clone() for parameter in model.parameters()]
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.record = TrainingRecord()
        self._tables: dict[int, RowSteps] = {}

    def step(self, settings: TrainSettings) -> None:
        """AdamW and then the average: of the rows used where a gradient is sparse, of everything else whole."""
        weights = list(self.model.parameters())
        sparse = take_sparse_gradients(weights)
        assert sparse.keys() >= self._tables.keys(), "a table that is learned by rows is learned so at every step"
        self.adamw.step()
        whole = [place for place in range(len(weights)) if place not in sparse]
        at = self.record.step
        average_into([self.average[place] for place in whole], [weights[place] for place in whole], settings, at)
        for place, gradient in sparse.items():
            if place not in self._tables:
                self._tables[place] = RowSteps(weights[place], self.average[place])
            self._tables[place].step(self.adamw, gradient, memory_at(settings, at))
        self.record.step += 1

    def settle(self) -> None:
        """Bring the average up to date where it waits for rows that are not used. Due before anyone looks at it."""
        for table in self._tables.values():
            table.settle()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors that are saved and filled again, the optimiser's moments aside."""
        for index, parameter in enumerate(self.model.parameters()):
            yield f"weight.{index}", parameter.detach()
            yield f"average.{index}", self.average[index]
            yield f"best.{index}", self.best[index]

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for index, parameter in enumerate(self.model.parameters()):
            for name, tensor in sorted(self.adamw.state[parameter].items()):
                yield f"{name}.{index}", tensor

    def _counted(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"counted.{name}", tensor) for name, tensor in self.counted.items())

    def save(self, path: Path) -> None:
        """Replace the file; a kill at any moment leaves the old one or the new one."""
        kept = (*self._tensors(), *self._moments(), *self._counted())
        tensors = {name: tensor.cpu().contiguous() for name, tensor in kept}
        tensors["generator"] = self.generator.get_state()
        self.record.numpy_state = _numpy_state(self.rng)
        beside = path.with_name(f".{path.name}.writing")
        with explained_writing(path):
            save_file(tensors, beside, metadata={HEADER: msgspec.json.encode(self.record).decode()})
            beside.replace(path)

    def load(self, path: Path) -> None:
        """Go on from the file: the very next batch is the one that would have come."""
        try:
            with safe_open(path, framework="pt") as file:
                self.record = msgspec.json.decode(file.metadata()[HEADER], type=TrainingRecord)
                expected = len(list(self._tensors())) * 2 + len(self.counted) + 1  # as many moments as tensors
                if len(file.keys()) != expected:
                    raise KeyError("it belongs to a model of another shape")
                with torch.no_grad():
                    for name, tensor in (*self._tensors(), *self._counted()):
                        tensor.copy_(file.get_tensor(name))
                for index, parameter in enumerate(self.model.parameters()):
                    self.adamw.state[parameter] = {
                        name: file.get_tensor(f"{name}.{index}").to(parameter.device if name != "step" else "cpu")
                        for name in ("exp_avg", "exp_avg_sq", "step")
                    }
                self.generator.set_state(file.get_tensor("generator"))
        except (OSError, SafetensorError, KeyError, TypeError, RuntimeError, msgspec.MsgspecError) as error:
            raise FolderError(
                f"{path} cannot be taken up ({error}); remove it and train again without --resume."
            ) from error
        self.rng.bit_generator.state = _from_numpy_state(self.record.numpy_state)

    def keep_best(self) -> None:
        with torch.no_grad():
            for kept, now in zip(self.best, self.average, strict=True):
                kept.copy_(now)


def _numpy_state(rng: np.random.Generator) -> str:
    """JSON without numbers beyond 64 bits, which JSON readers disagree about."""
    state: dict[str, Any] = rng.bit_generator.state  # type: ignore[assignment]
    inner = {key: str(value) for key, value in state["state"].items()}
    return msgspec.json.encode({**state, "state": inner}).decode()


def _from_numpy_state(text: str) -> dict[str, Any]:
    state = msgspec.json.decode(text, type=dict[str, Any])
    return {**state, "state": {key: int(value) for key, value in state["state"].items()}}


def read_record(path: Path) -> TrainingRecord:
    """How far a saved training got, tensors aside."""
    try:
        with safe_open(path, framework="pt") as file:
            return msgspec.json.decode(file.metadata()[HEADER], type=TrainingRecord)
    except (OSError, SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise FolderError(f"{path} cannot be read ({error}); train again without --resume.") from error


def read_best(model: nn.Module, path: Path) -> None:
    """Give a model the best weights of a saved training of it."""
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(file.get_tensor(f"best.{index}"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FolderError(f"{path} cannot be read ({error}); train again without --from.") from error
