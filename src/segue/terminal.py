"""Progress on a terminal: a bar if standard error is one, plain lines otherwise, nothing when quiet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from segue.errors import SegueError

if TYPE_CHECKING:
    from segue.training.loop import TrainingProgress

SECONDS_BETWEEN_LINES = 10.0


def is_first_process() -> bool:
    """Whether this process prints: the first of those that `torchrun` started, or the only one."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def print_line(text: str) -> None:
    """Print a line on standard output without markup, which would change some ids."""
    if not is_first_process():
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at exit
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe
            sys.exit(0)
        raise SegueError(f"Standard output cannot be written: {error.strerror or error}. Send it elsewhere.") from error


def print_error(text: str) -> None:
    """Print a line on standard error: an error, or how to continue."""
    if is_first_process():
        sys.stderr.write(text + "\n")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Display:
    """One bar on standard error, or a line every ten seconds."""

    def __init__(self, *, quiet: bool = False, interrupted: Callable[[], str] | None = None) -> None:
        """`interrupted`: the message after Ctrl-C, which ends the process with code 130."""
        self._interrupted = interrupted
        console = Console(stderr=True)
        self.quiet = quiet or not is_first_process()
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        if not self.quiet and console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"), console=console
            )
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if isinstance(error, KeyboardInterrupt) and self._interrupted is not None:
            print_error(self._interrupted())
            sys.exit(130)

    def show(self, description: str, done: float, total: float, facts: str) -> None:
        """Update the bar, or print a line if the last one is old enough."""
        if self.bar is not None:
            if self.task is None:
                self.bar.start()
                self.task = self.bar.add_task(description, total=total, facts=facts)
            self.bar.update(self.task, description=description, completed=done, total=total, facts=facts)
        elif not self.quiet and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self.line(f"{description}: {facts}" if facts else f"{description}: {done:,.0f} of {total:,.0f}")

    def line(self, text: str) -> None:
        """Print a line that stays above the bar."""
        if self.quiet:
            return
        self._last_line = time.monotonic()
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print_error(text)

    def stage(self, name: str, done: int, total: int) -> None:
        """Show a stage: how much is done, and of how much if that is known."""
        self.show(name, done, total, f"{done:,} of {total:,}" if total else f"{done:,}")

    def step(self, step: TrainingProgress) -> None:
        """Show a step of training or of the evaluation after it, and print a line for each epoch."""
        for line in step.plan:
            self.line(line)
        if step.plan:
            return
        if step.measured:
            self.stage(f"measuring {step.measured}", step.done, step.total)
            return
        speed = self._show_training(step, "")
        if step.scores is not None:
            scores = "  ".join(f"{name} {value:.4f}" for name, value in step.scores.items())
            best = " (best)" if step.best_epoch == step.epoch else ""
            self.line(f"epoch {step.epoch:3}/{step.epochs}  loss {step.loss:.4f}  {scores}{best}  {speed}")

    def trial_step(self, trial: int, step: TrainingProgress) -> None:
        """Show a step of a trial's training."""
        self._show_training(step, f"trial {trial}, ")

    def _show_training(self, step: TrainingProgress, prefix: str) -> str:
        what = f"{prefix}{step.of}, " if step.of else prefix
        speed = f"{step.tokens_per_second:,.0f} tokens/s  {duration(step.seconds_left)} left"
        self.show(f"{what}epoch {step.epoch}/{step.epochs}", step.done, step.total, f"loss {step.loss:.4f}  {speed}")
        return speed
