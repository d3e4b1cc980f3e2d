"""Memory and CPU time of a process and its children while a measurement runs."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import psutil

SAMPLE_SECONDS = 0.25


class Watch(threading.Thread):
    """Samples the memory and the CPU time of a process and its children while the block runs."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._began, self._used = time.monotonic(), self._cpu()
        self.before = self.peak = self.rss()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            with suppress(psutil.Error):  # a worker may end between two samples
                self.peak = max(self.peak, self.rss())

    def usage(self) -> dict[str, float]:
        """Memory, and CPU time in cores, since the start."""
        share = self.cpu_seconds() / (time.monotonic() - self._began)
        after = self.rss()
        return {"rss_before": self.before, "rss_peak": max(self.peak, after), "rss_after": after, "cpu_share": share}

    def cpu_seconds(self) -> float:
        """Processor time from the beginning until now."""
        return self._cpu() - self._used

    def rss(self) -> int:
        return sum(each.memory_info().rss for each in self._family())

    def threads(self) -> int:
        return sum(each.num_threads() for each in self._family())

    def _cpu(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self._family())

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
