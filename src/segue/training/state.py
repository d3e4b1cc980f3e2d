"""The state of training, saved after each epoch as one safetensors file, from which training resumes exactly.

The file holds the weights, their average, the best weights so far, the optimiser's moments, the objective's counters
and both random states. The record of the epochs is JSON in the file's header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from segue.errors import FolderError
from segue.folders import explained_writing
from segue.training.optimiser import average_into, averaging_decay
from segue.training.settings import TrainSettings
from segue.training.sparse_rows import SparseRows, take_sparse_gradients

HEADER = "segue"


class TrainingRecord(msgspec.Struct, kw_only=True):
    """The epochs so far."""

    epoch: int = 0
    step: int = 0
    best_epoch: int = 0
    best_score: float = -1.0
    history: list[dict[str, float | int]] = []
    seconds: list[float] = []
    """Training time of each epoch, without validation. It is not in the history, which must be repeatable."""
    elapsed: float = 0.0
    """Seconds of training and validation so far."""
    limit: float | None = None
    """The seconds that they may take, of those in `train.minutes`; None is no limit."""
    cut: bool = False
    """Whether the limit ended training."""
    interrupted: bool = False
    """Whether Ctrl-C ended the first epoch early. A run can be written of it; resumed training begins anew."""
    numpy_state: str = ""


class TrainingState:
    """Everything that changes while training."""

    def __init__(
        self, model: nn.Module, adamw: torch.optim.AdamW, *, seed: int, counters: Mapping[str, Tensor] | None = None
    ) -> None:
        """`counters`: the objective's tensors that change in place while training, by name."""
        self.model = model
        self.adamw = adamw
        self.counters = counters or {}
        self.average = [parameter.detach().clone() for parameter in model.parameters()]
        self.best = [parameter.detach().clone() for parameter in model.parameters()]
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.record = TrainingRecord()
        self._tables: dict[int, SparseRows] = {}

    def step(self, settings: TrainSettings) -> None:
        """Update the weights by AdamW, then their average. With a sparse gradient, only its rows are updated."""
        weights = list(self.model.parameters())
        sparse = take_sparse_gradients(weights)
        assert sparse.keys() >= self._tables.keys(), "a table with sparse gradients has them at every step"
        self.adamw.step()
        decay = averaging_decay(settings, self.record.step)
        dense = [index for index in range(len(weights)) if index not in sparse]
        average_into([self.average[index] for index in dense], [weights[index] for index in dense], decay)
        for index, gradient in sparse.items():
            if index not in self._tables:
                self._tables[index] = SparseRows(weights[index], self.average[index])
            self._tables[index].step(self.adamw, gradient, decay)
        self.record.step += 1

    def settle(self) -> None:
        """Bring the average of tables with sparse gradients up to date. Needed before the average is read."""
        for table in self._tables.values():
            table.settle()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors that are saved and loaded, without the optimiser's moments."""
        for index, parameter in enumerate(self.model.parameters()):
            yield f"weight.{index}", parameter.detach()
            yield f"average.{index}", self.average[index]
            yield f"best.{index}", self.best[index]
        for name, tensor in self.counters.items():
            yield f"counter.{name}", tensor

    def save(self, path: Path) -> None:
        """Replace the file: if the process is killed, the old file or the new one is there."""
        tensors = dict(self._tensors())
        for index, parameter in enumerate(self.model.parameters()):
            tensors |= {f"{name}.{index}": tensor for name, tensor in self.adamw.state[parameter].items()}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        tensors["generator"] = self.generator.get_state()
        self.record.numpy_state = json.dumps(self.rng.bit_generator.state)  # msgspec has no numbers beyond 64 bits
        staging = path.with_name(f".{path.name}.writing")
        with explained_writing(path):
            save_file(tensors, staging, metadata={HEADER: msgspec.json.encode(self.record).decode()})
            staging.replace(path)

    def load(self, path: Path) -> TrainingRecord:
        """Resume from the file: the next batch is the one that would have followed."""
        try:
            with safe_open(path, framework="pt") as file:
                self.record = msgspec.json.decode(file.metadata()[HEADER], type=TrainingRecord)
                if len(file.keys()) != 6 * len(self.average) + len(self.counters) + 1:
                    raise KeyError("it belongs to a model of another shape")
                with torch.no_grad():
                    for name, tensor in self._tensors():
                        tensor.copy_(file.get_tensor(name))
                for index, parameter in enumerate(self.model.parameters()):
                    self.adamw.state[parameter] = {
                        name: file.get_tensor(f"{name}.{index}").to(parameter.device if name != "step" else "cpu")
                        for name in ("exp_avg", "exp_avg_sq", "step")
                    }
                self.generator.set_state(file.get_tensor("generator"))
        except (OSError, SafetensorError, KeyError, TypeError, RuntimeError, msgspec.MsgspecError) as error:
            raise FolderError(
                f"Training cannot resume from {path} ({error}); remove it and train again without --resume."
            ) from error
        self.rng.bit_generator.state = json.loads(self.record.numpy_state)
        return self.record

    def keep_best(self) -> None:
        torch._foreach_copy_(self.best, self.average)


def read_training_record(path: Path) -> TrainingRecord:
    """The record of a saved state."""
    try:
        with safe_open(path, framework="pt") as file:
            return msgspec.json.decode(file.metadata()[HEADER], type=TrainingRecord)
    except (OSError, SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise FolderError(f"{path} cannot be read ({error}); train again without --resume.") from error


def read_best(model: nn.Module, path: Path) -> None:
    """Load the best weights of a saved state into a model."""
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(file.get_tensor(f"best.{index}"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FolderError(f"{path} cannot be read ({error}); train again without --from.") from error
