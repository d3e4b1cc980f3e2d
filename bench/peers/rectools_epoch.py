"""Time RecTools' models: training events (npz: users, items, times, in order) → what an epoch took, as JSON.

Runs in the peers' own environment (`.venv-peers`), so it imports nothing of segue:

    .venv-peers/bin/python bench/peers/rectools_epoch.py train.npz --epochs 2
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytorch_lightning
import rectools
import torch
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import HSTUModel, SASRecModel

MODELS = {"sasrec": SASRecModel, "hstu": HSTUModel}


class EpochClock(pytorch_lightning.Callback):
    """Seconds of each epoch, batching included; the first, untimed one also counts the supervised positions."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.positions = 0

    def on_train_epoch_start(self, trainer, module) -> None:
        self.began = time.perf_counter()

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.current_epoch == 0:
            self.positions += int((batch["y"] != 0).sum())

    def on_train_epoch_end(self, trainer, module) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def make_trainer(epochs: int) -> pytorch_lightning.Trainer:
    """RecTools' own trainer, silent, with the clock in it."""
    return pytorch_lightning.Trainer(
        max_epochs=epochs,
        min_epochs=epochs,
        accelerator="cpu",
        devices=1,
        precision="32-true",
        callbacks=[EpochClock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def training_dataset(path: Path) -> Dataset:
    """The events in their order: a row later is a nanosecond later, so ties cannot move."""
    with np.load(path, allow_pickle=False) as arrays:
        users, items, microseconds = arrays["users"], arrays["items"], arrays["times"]
    times = microseconds * 1000 + np.arange(len(users))
    table = pd.DataFrame(
        {
            Columns.User: users,
            Columns.Item: items,
            Columns.Weight: 1.0,
            Columns.Datetime: pd.to_datetime(times, unit="ns"),
        }
    )
    return Dataset.construct(table)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", type=Path)
    parser.add_argument("--model", choices=("sasrec", "hstu"), default="sasrec")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loss", choices=("softmax", "sampled_softmax"), default="softmax")
    parser.add_argument("--negatives", type=int, default=256, help="of each position, for sampled_softmax")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    pytorch_lightning.seed_everything(arguments.seed, verbose=False)
    model = MODELS[arguments.model](
        n_factors=arguments.width,
        n_blocks=arguments.depth,
        n_heads=arguments.heads,
        session_max_len=arguments.length,
        dropout_rate=arguments.dropout,
        loss=arguments.loss,
        n_negatives=arguments.negatives,
        batch_size=arguments.batch,
        epochs=arguments.epochs,
        dataloader_num_workers=0,
        get_trainer_func=make_trainer,
        get_trainer_func_kwargs={"epochs": arguments.epochs},
    )
    model.fit(training_dataset(arguments.events))
    clock = model.fit_trainer.callbacks[0]  # fit works on a copy of the trainer
    assert isinstance(clock, EpochClock)
    result = {
        "trainer": f"RecTools {arguments.model}",
        "loss": "softmax" if arguments.loss == "softmax" else f"sampled, {arguments.negatives} each",
        "versions": {
            "python": platform.python_version(),
            "rectools": rectools.__version__,
            "pytorch-lightning": pytorch_lightning.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "threads": torch.get_num_threads(),
        "dtype": str(next(model.torch_model.parameters()).dtype).removeprefix("torch."),
        "positions": clock.positions,
        "items": len(model.data_preparator.get_known_item_ids()),
        "parameters": sum(parameter.numel() for parameter in model.torch_model.parameters()),
        "seconds": clock.seconds,
        "losses": clock.losses,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
