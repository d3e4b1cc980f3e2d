"""One training on several processes: torch's launcher starts them and starts them again, and each finds the others.

`torchrun` starts processes that call `segue.train` by themselves, on one machine or on many that share a file system;
`on_processes` does so on this machine. Either way the launcher is torch's (torch.distributed.elastic): when a process
dies it stops the others and starts all anew, and they go on from the last saved state.
"""

from __future__ import annotations

import _thread
import atexit
import hashlib
import itertools
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from uuid import uuid4

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from segue.errors import SegueError, SettingsError, TrainingError
from segue.process_group import SINGLE_PROCESS, ProcessGroup
from segue.training.distributed.process_group import TorchProcessGroup

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

RESTARTS = 3  # as torch's launcher has it
PATIENCE = timedelta(hours=6)  # of those that wait while the first learns codes or builds an index; a death is noticed
LONGEST_WORD = 1 << 16  # bytes of a message; they have some hundred
OTHERS = "TORCHELASTIC_RUN_ID"  # set where torch's launcher started this process
LONGEST_FOLDER = 60  # characters: an address in a folder below it may have a hundred
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_trainings = itertools.count()

log = logging.getLogger(__name__)


def launched() -> bool:
    """Whether torch's launcher started this process as one of several."""
    return OTHERS in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launchers(group: ProcessGroup) -> frozenset[str]:
    """Names of those that started the processes of a group, one on each machine, for a training: they outlive the
    processes, so who meets one of the names again was started again. Of one process alone there is none.

    Where a program trains several times, each time has names of its own, which are the same when it is started again.
    """
    return frozenset(group.all_gather_objects(f"{_launcher()}-{next(_trainings)}")) if group.size > 1 else frozenset()


def _launcher() -> str:
    """Told from any other by the launch's name, which need not be its own, and by the launcher's process."""
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # no Linux
        began = ""
    name = " ".join((os.environ[OTHERS], socket.gethostname(), str(parent), began))
    return hashlib.sha256(name.encode()).hexdigest()[:16]


@contextmanager
def joined() -> Iterator[ProcessGroup]:
    """The processes that this one was started with: gloo between CPUs, NCCL between GPUs. They find each other once and
    stay in touch to their end. The machine's cores are shared out among its processes, unless OMP_NUM_THREADS says
    otherwise."""
    if not launched():
        yield SINGLE_PROCESS
        return
    if not distributed.is_initialized():
        _meet()
        atexit.register(_part)
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        yield TorchProcessGroup(distributed.get_rank(), distributed.get_world_size())
    finally:
        torch.set_num_threads(before)


def _meet() -> None:
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    # The launcher's store outlives its processes, and who is started again would find the addresses of the dead there
    # (pytorch/pytorch#135712). Machines count restarts each for itself, so of several the launcher has to see to it.
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        store = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    distributed.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=PATIENCE)


def _part() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class DeathsError(TrainingError):
    """Processes died too often to be started again."""


Work = Callable[[Any, Callable[[bytes], None]], None]
"""What each process does: with its arguments, and a way to tell the caller something."""


def on_processes(
    count: int, work: Work, arguments: Any, *, heard: Callable[[bytes], None], restarts: int = RESTARTS
) -> None:
    """Let so many processes on this machine do `work`, a function of a module, and wait for them. `heard` is called, in
    a thread, with what they tell. What one of them refuses with a sentence is refused here; where processes die too
    often, `DeathsError` says so. Ctrl-C and SIGTERM end all of them; what was ignored before (`nohup`) still is."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if launched():
        raise SettingsError(
            "torchrun has started this process as one of several and says how many there are: leave --processes out."
        )
    with _quiet_launcher(), _own_signals(), _Listener(heard) as listener:
        launch = elastic_launch(_this_machine(count, restarts, listener.folder / "logs"), _member)
        try:
            refusals = launch(work, arguments, str(listener.address))
        except SignalException as caught:
            ended: BaseException | signal.Signals | None = caught.sigval
        except ChildFailedError as failure:
            ended = DeathsError(f"The processes died {restarts + 1} times, at last with: {_first_words(failure)}.")
        else:
            ended = next((refusal for refusal in refusals.values() if refusal is not None), None)
    if listener.trouble is not None:
        raise listener.trouble
    if ended == signal.SIGINT:
        raise KeyboardInterrupt
    if isinstance(ended, signal.Signals):
        signal.raise_signal(ended)  # now with the handler that was there before
        raise TrainingError(f"Training was ended by {ended.name}.")
    if ended is not None:
        raise ended


def _this_machine(count: int, restarts: int, logs: Path) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        signals_to_handle=",".join(kind.name for kind in _handled(ENDING)),
    )


def _handled(kinds: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of these signals that are not ignored."""
    return [kind for kind in kinds if signal.getsignal(kind) != signal.SIG_IGN]


def _member(work: Work, arguments: Any, address: str) -> SegueError | None:
    """In each process. What is refused is a result: who fails is started again, and would be refused again."""
    if _handled([signal.SIGINT]):
        signal.signal(signal.SIGINT, _leave)  # Ctrl-C is meant for all; the launcher ends the others
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as words:
        words.connect(address)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and os.environ["RANK"] == "0":
            words.sendall(b"")
        try:
            work(arguments, words.sendall)
        except SegueError as error:
            return error
        finally:
            _part()
    return None


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    os._exit(128 + number)


class _Listener:
    """Hears what processes tell. A datagram is whole or not there, whenever its sender is killed."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self.trouble: BaseException | None = None
        """What `heard` raised, which ends everything."""
        self._heard = heard
        usual = tempfile.gettempdir()
        self._made = tempfile.TemporaryDirectory(
            prefix="segue-processes-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp"
        )
        self.folder = Path(self._made.name)
        self.address = self.folder / "words"
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(str(self.address))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="segue-listener", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.address))
        self._thread.join()
        self._ear.close()
        self._made.cleanup()

    def _listen(self) -> None:
        while (word := self._ear.recv(LONGEST_WORD)) or not self._over.is_set():
            if not word:
                log.warning("A process died; all were started again and go on from the last saved state.")
            elif self.trouble is None:  # who tells must never wait, so listening goes on
                self._hear(word)

    def _hear(self, word: bytes) -> None:
        try:
            self._heard(word)
        except BaseException as trouble:  # noqa: BLE001  # whatever it is, the caller is to get it
            self.trouble = trouble
            _thread.interrupt_main(_handled((signal.SIGINT, *ENDING))[0])


@contextmanager
def _own_signals() -> Iterator[None]:
    """The launcher sets handlers of its own and leaves them there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.getsignal(kind) for kind in ENDING]
    try:
        yield
    finally:
        for kind, handler in zip(ENDING, before, strict=True):
            signal.signal(kind, handler)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Of a process that dies the launcher writes tracebacks of its own; one sentence of ours says it."""
    known = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(LAUNCHERS)]
    levels = [logger.level for logger in known]
    for logger in known:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(known, levels, strict=True):
            logger.setLevel(level)


LAUNCHERS = ("torch.distributed.elastic", "torch.multiprocessing")


def _first_words(failure: Any) -> str:
    """What the process died of that died first."""
    _, first = failure.get_first_failure()
    message = first.message["message"] if isinstance(first.message, dict) else first.message
    return str(message).strip().splitlines()[0].rstrip(".")
