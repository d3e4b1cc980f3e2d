"""Everything that test_processes.py needs of two processes, in one launch, because starting them takes seconds.

The same functions in a single process give the expected results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from cycle_logs import N_ITEMS, POPULARITY, Log, cycle, recipe_of, weights_of
from safetensors.torch import save_file
from torch import Tensor

from segue.errors import SegueError
from segue.evaluation.evaluate import evaluate
from segue.evaluation.evaluator import Evaluator, ModelScorer
from segue.evaluation.settings import EvaluateSettings
from segue.evaluation.window.cases import window_cases
from segue.evaluation.window.evaluate import rank_targets, user_values
from segue.layers.dropout import set_generator
from segue.layers.packed import tensors
from segue.models.build import build_model
from segue.models.items.tables import DataFacts
from segue.models.sequence import SequenceModel
from segue.objective.batch_shard import BatchShard
from segue.objective.losses import catalogue
from segue.objective.objective import Objective
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.runs.make import make_run
from segue.runs.request import TrainingRequest
from segue.training.distributed.gradients import sum_gradients
from segue.training.distributed.processes import join_group
from segue.training.loop import fit
from segue.training.train import STATE, TrainingSetup, choose_epoch
from segue.training.windows import Windows, training_windows

LOG = Log.of(cycle())
STEPS = 20


@dataclass(frozen=True)
class Case:
    """One way to train. A batch of 60 events has users of different lengths, so shards are uneven."""

    objective: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    users: int = 60
    tokens: int = 60
    by_rows: bool = False
    """Whether the items' gradients are sparse."""
    epochs: int = 3


ONE_USER: dict[str, Any] = {"users": 22, "tokens": 9, "epochs": 1}
SHARED = {"loss": "sampled-softmax", "sampler": "uniform", "sampler__negatives": 6}
CODED = {"items": "codes", "items__parts": 2, "items__values": 4}
CASES = {
    "softmax": Case({}),
    "one user a batch, so that a process has none": Case({}, **ONE_USER),
    "shared negatives": Case(POPULARITY),
    "shared negatives, by rows": Case(POPULARITY, by_rows=True),
    "none and by rows": Case(POPULARITY, {"items__tied": False}, by_rows=True, **ONE_USER),
    "own negatives": Case({**SHARED, "loss": "bce", "sampler__shared": False, "sampler__negatives": 3}),
    "gbce": Case({**SHARED, "loss": "gbce"}),
    "in-batch": Case({**SHARED, "sampler": "in-batch"}),
    "answers, which are counted": Case({**SHARED, "sampler": "targets+uniform"}),
    "equal users": Case({**SHARED, "loss": "bpr", "equal_users": True}),
    "masks": Case({"task": "masked-item"}, {"kind": "bert4rec", "heads": 1}),
    "lists": Case({"task": "recency", "loss": "lambdarank", "task__cuts": 2}),
    "groups": Case({**SHARED, "task": "recency", "task__cuts": 3}),
    "days ahead": Case({**SHARED, "task": "dense-all-action", "task__labels": 3}),
    "continuations": Case({"task": "continuation", "task__items": 2, "task__cuts": 2}, {"kind": "seq2seq"}),
    "buckets": Case({"loss": "sce", "loss__bucket_items": 4}),
    "mixture": Case({**SHARED, "sampler__negatives": 4}, {"similarity": "mol", "similarity__part_width": 4}),
    "none and a mixture": Case(SHARED, {"similarity": "mol", "similarity__part_width": 4}, **ONE_USER),
    "none and buckets": Case({"loss": "sce", "loss__bucket_items": 4}, **ONE_USER),
    "codes": Case({}, CODED),
    "none and codes": Case({}, CODED, **ONE_USER),
}


def prepare(case: Case) -> tuple[TrainingSetup, SequenceModel, Objective]:
    recipe = recipe_of(
        model={"dropout": 0.0, **dropless(case.model), **case.model},
        objective=case.objective,
        epochs=case.epochs,
        tokens=case.tokens,
        averaging=0.9,
    )
    generator = torch.Generator().manual_seed(recipe.train.seed)
    codes = np.random.default_rng(1).integers(0, 4, (N_ITEMS + 1, 2)).astype(np.uint8)
    facts = DataFacts(codes=codes if case.model.get("items") == "codes" else None)
    model = build_model(recipe.model, N_ITEMS, generator=generator, facts=facts).double()
    model.items.sparse_gradients = case.by_rows
    return recipe, model, Objective(recipe.objective, LOG.counts, length=model.length)


def dropless(model: dict[str, Any]) -> dict[str, Any]:
    return (
        {"similarity__item_dropout": 0.0, "similarity__gate_dropout": 0.0} if model.get("similarity") == "mol" else {}
    )


def train_case(case: Case, folder: Path, group: ProcessGroup = SINGLE_PROCESS) -> dict[str, Tensor]:
    """Weights after some epochs, the state of the objective, and losses."""
    recipe, model, objective = prepare(case)
    folder.mkdir()
    windows = training_windows(LOG.sequences, LOG.split.train_end, length=model.length + objective.extra)
    with patch.object(catalogue, "LEAST_CODED", 1):  # scores are sums over codes, as for large catalogues
        state = fit(
            model,
            objective,
            Windows(windows.sequences, windows.starts[: case.users], windows.ends[: case.users]),
            settings=recipe.train,
            epochs=recipe.train.epochs,
            validate=None,
            state_file=folder / STATE,
            group=group,
        )
    assert state.record.step >= STEPS
    losses = [float(line["loss"]) for line in state.record.history]
    return {**weights_of(model), **objective.state, "losses": torch.tensor(losses, dtype=torch.float64)}


def sampled_gradients(group: ProcessGroup = SINGLE_PROCESS) -> dict[str, Tensor]:
    """Gradients of REINFORCE, from states that do not depend on the number of processes: each samples its own."""
    case = Case(SHARED, {"kind": "narm", "scores": "bilinear", "choice": "reinforce"})
    recipe, model, objective = prepare(case)
    set_generator(model, torch.Generator().manual_seed(5))
    batch = next(LOG.windows(recipe).batches(60, np.random.default_rng(2)))
    examples = objective.examples(batch, np.random.default_rng(3))
    shard = BatchShard.of(examples, group)
    hidden = model.train().encode(tensors(examples.inputs))
    before = sum(len(rows) for rows in shard.rows[: group.rank])  # each state belongs to one process
    states = hidden[before : before + len(shard.own.inputs.items)]
    loss = objective.loss(model, states, examples, torch.Generator().manual_seed(4), shard)
    torch.autograd.backward(loss)
    value = sum_gradients(list(model.parameters()), loss, group)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {**gradients, "loss": torch.tensor(value, dtype=torch.float64)}


def evaluations(group: ProcessGroup = SINGLE_PROCESS) -> dict[str, Any]:
    """The report of an untrained model, its ranks, and its ranks in a time window."""
    _, model, _ = prepare(Case({}))
    scorer, settings = ModelScorer(model.float()), EvaluateSettings(at=(1, 3, 10))
    evaluation = evaluate(scorer, LOG.whole, settings=settings, group=group)
    evaluator = Evaluator(sequences=LOG.sequences, counts=LOG.counts, seen="kept", group=group)
    cases = LOG.split.cases("valid", "last")
    window = window_cases(LOG.sequences, time=4_500_000, until=9_000_000)
    interest = np.arange(N_ITEMS + 1) % 3
    ranks = rank_targets(evaluator, scorer, window, (1, 3), time=window.time, interest=interest)
    return {
        "report": msgspec.to_builtins(evaluation.report),
        "ranks": evaluation.ranks.tolist(),
        "few at a time": evaluator.ranks(scorer, cases, tokens=20).tolist(),
        "window": {name: values.tolist() for name, values in user_values(window, ranks, (1, 3)).items()},
        "shown": {str(k): times.tolist() for k, times in ranks.shown.items()},
    }


def train_and_choose(recipe: TrainingSetup, folder: Path, group: ProcessGroup = SINGLE_PROCESS) -> dict[str, Tensor]:
    """Train with validation, or resume it."""
    folder.mkdir(exist_ok=True)
    model, _ = choose_epoch(replace(recipe, group=group), LOG.whole, seen="kept", folder=folder)
    return weights_of(model)


def refusal(data: Path, out: Path) -> str:
    """The error of each process if the folder exists already."""
    try:
        make_run(TrainingRequest(data, out=out))
    except SegueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_as_one_of_two(paths: tuple[Path, Path], send: Callable[[bytes], None]) -> None:
    """Run everything as one of two processes, and write the results of each into the folder."""
    folder, data = paths
    refusal_message = refusal(data, folder)
    with join_group() as group:
        weights: dict[str, dict[str, Tensor]] = {
            name: train_case(case, folder / f"{group.rank} {name}", group) for name, case in CASES.items()
        }
        weights["sampled"] = sampled_gradients(group)
        folder_of_resumed = folder / "together"
        weights["resumed by two"] = train_and_choose(
            recipe_of(epochs=3, model=DROPLESS), folder / "from one process", group
        )
        weights["first epoch by two"] = train_and_choose(
            recipe_of(epochs=1, model=DROPLESS), folder / "from two processes", group
        )
        weights["whole"] = train_and_choose(recipe_of(epochs=2), folder / "whole", group)
        train_and_choose(recipe_of(epochs=1), folder_of_resumed, group)
        weights["resumed"] = train_and_choose(recipe_of(epochs=2), folder_of_resumed, group)
        report = evaluations(group)
    body = {**report, "refusal": refusal_message}
    (folder / f"report{group.rank}.json").write_bytes(msgspec.json.encode(body))
    flat = {
        f"{name}/{key}": value.contiguous()
        for name, case_weights in weights.items()
        for key, value in case_weights.items()
    }
    save_file(flat, folder / f"learned{group.rank}.safetensors")
    send(f"process {group.rank} of {group.size}".encode())


DROPLESS = {"dropout": 0.0}


def train_one_epoch(folder: Path) -> None:
    """Train one epoch in one process, from which two resume."""
    train_and_choose(recipe_of(epochs=1, model=DROPLESS), folder / "from one process")
