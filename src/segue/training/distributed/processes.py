"""One training on several processes: torch's launcher starts and restarts them, and they join one group.

`torchrun` starts processes that each call `segue.train`, on one machine or on several that share a file system.
`run_on_processes` starts them on this machine. Either way the launcher is torch.distributed.elastic: if a process dies,
it stops the others and starts all again, and they resume from the last saved state.
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
from typing import TYPE_CHECKING, Any, Self
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

RESTARTS = 3  # the default of torch's launcher
TIMEOUT = timedelta(hours=6)  # process 0 may learn codes or build an index; a death is noticed without a timeout
LONGEST_MESSAGE = 1 << 16  # bytes; messages have a few hundred
RUN_ID = "TORCHELASTIC_RUN_ID"  # set by torch's launcher
LONGEST_FOLDER = 60  # characters: the address of a socket in a folder below it may have about a hundred
LAUNCHER_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_trainings = itertools.count()

log = logging.getLogger(__name__)


def launched() -> bool:
    """Whether torch's launcher started this process as one of several."""
    return RUN_ID in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launcher_names(group: ProcessGroup) -> frozenset[str]:
    """The names of a group's launchers, one for each machine, for one training; none for a single process.

    A launcher outlives its processes, so a process that finds one of the names in a saved state was restarted. A
    program that trains several times has other names each time, and the same ones when it is restarted.
    """
    if group.size == 1:
        return frozenset()
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # no Linux
        started = ""
    launcher = " ".join((os.environ[RUN_ID], socket.gethostname(), str(parent), started))  # run ids may not be unique
    name = f"{hashlib.sha256(launcher.encode()).hexdigest()[:16]}-{next(_trainings)}"
    return frozenset(group.all_gather_objects(name))


@contextmanager
def join_group() -> Iterator[ProcessGroup]:
    """The group of the processes that were launched with this one: gloo between CPUs, NCCL between GPUs.

    They connect once, until they end. Each gets its share of the machine's cores, unless OMP_NUM_THREADS is set.
    """
    if not launched():
        yield SINGLE_PROCESS
        return
    if not distributed.is_initialized():
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        # The launcher's store outlives its processes: a restarted process would find the addresses of dead ones there
        # (pytorch/pytorch#135712). Each machine counts its own restarts, so with several the launcher must handle it.
        if os.environ["GROUP_WORLD_SIZE"] == "1":
            store = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        distributed.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        atexit.register(_disconnect)
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        yield TorchProcessGroup(distributed.get_rank(), distributed.get_world_size())
    finally:
        torch.set_num_threads(before)


def _disconnect() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class ProcessesDiedError(TrainingError):
    """Processes died more often than they are restarted."""


Work = Callable[[Any, Callable[[bytes], None]], None]
"""The function of each process: its arguments, and a function that sends a message to the caller."""


def run_on_processes(
    count: int, work: Work, arguments: Any, *, receive: Callable[[bytes], None], restarts: int = RESTARTS
) -> None:
    """Run `work`, a function of a module, in so many processes on this machine and wait for them.

    `receive` is called with their messages, in a thread. A SegueError of one of them is raised here, and
    `ProcessesDiedError` if they die too often. Ctrl-C and SIGTERM end all of them; ignored signals (`nohup`) stay
    ignored.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if launched():
        raise SettingsError(
            "torchrun started this process as one of several, so their number is known: leave --processes out."
        )
    with _contained_launcher(), _Receiver(receive) as receiver:
        launch = elastic_launch(_launch_config(count, restarts, receiver.folder / "logs"), _process)
        try:
            errors = launch(work, arguments, str(receiver.address))
        except SignalException as caught:
            outcome: BaseException | signal.Signals | None = caught.sigval
        except ChildFailedError as failure:
            sentence = f"The processes died {restarts + 1} times, the last time with: {_first_message(failure)}."
            outcome = ProcessesDiedError(sentence)
        else:
            outcome = next((error for error in errors.values() if error is not None), None)
    if receiver.error is not None:
        raise receiver.error
    if outcome == signal.SIGINT:
        raise KeyboardInterrupt
    if isinstance(outcome, signal.Signals):
        signal.raise_signal(outcome)  # now with the caller's own handler
        raise TrainingError(f"Training was ended by {outcome.name}.")
    if outcome is not None:
        raise outcome


def _launch_config(count: int, restarts: int, logs: Path) -> LaunchConfig:
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
    """The signals that are not ignored."""
    return [kind for kind in kinds if signal.getsignal(kind) != signal.SIG_IGN]


def _process(work: Work, arguments: Any, address: str) -> SegueError | None:
    """The main function of a process. It returns a SegueError: if it raised, the launcher would restart all."""
    if _handled([signal.SIGINT]):
        # Ctrl-C reaches all processes, and the launcher ends those that are left.
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messages:
        messages.connect(address)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and os.environ["RANK"] == "0":
            messages.sendall(b"")  # reports the restart
        try:
            work(arguments, messages.sendall)
        except SegueError as error:
            return error
        finally:
            _disconnect()
    return None


class _Receiver:
    """Receives the messages of the processes as datagrams, which are whole even if their sender is killed."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self.error: BaseException | None = None
        """What `receive` raised, which ends all processes."""
        self._receive = receive
        usual = tempfile.gettempdir()
        self._temporary = tempfile.TemporaryDirectory(
            prefix="segue-processes-", dir=usual if len(usual) < LONGEST_FOLDER else "/tmp"
        )
        self.folder = Path(self._temporary.name)
        self.address = self.folder / "messages"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.address))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segue-receiver", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.address))
        self._thread.join()
        self._socket.close()
        self._temporary.cleanup()

    def _run(self) -> None:
        while (message := self._socket.recv(LONGEST_MESSAGE)) or not self._closing.is_set():
            if not message:
                log.warning("A process died; all were started again and resume from the last saved state.")
            elif self.error is None:  # after an error messages are still read: a sender must never wait
                try:
                    self._receive(message)
                except BaseException as error:  # noqa: BLE001  # the caller gets it, whatever it is
                    self.error = error
                    _thread.interrupt_main(_handled((signal.SIGINT, *ENDING))[0])


@contextmanager
def _contained_launcher() -> Iterator[None]:
    """Restore the signal handlers, which the launcher replaces by its own, and silence its tracebacks of processes that
    died, which are reported in one sentence instead."""
    main = threading.current_thread() is threading.main_thread()  # only this thread has signal handlers
    handlers = {kind: signal.getsignal(kind) for kind in ENDING if main}
    names = [name for name in logging.root.manager.loggerDict if name.startswith(LAUNCHER_LOGGERS)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for kind, handler in handlers.items():
            signal.signal(kind, handler)


def _first_message(failure: Any) -> str:
    """The error of the process that died first."""
    _, first = failure.get_first_failure()
    message = first.message["message"] if isinstance(first.message, dict) else first.message
    return str(message).strip().splitlines()[0].rstrip(".")
