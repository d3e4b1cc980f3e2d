"""When requests were planned and when they were answered → figures: statuses, quantiles of the latency, each second."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec

OK = 200
LOST, UNREADABLE, UNANSWERED = 0, 1, 2  # no HTTP status is that small
REASONS = {LOST: "connection lost", UNREADABLE: "unreadable answer", UNANSWERED: "unanswered"}


class Second(msgspec.Struct, frozen=True):
    """The requests planned for one second of the measurement."""

    ok: int
    failed: int
    p90: float | None


class KindResult(msgspec.Struct, frozen=True):
    """The answers to the requests planned for the measurement; latencies are of those with status 200, in ms."""

    name: str
    requests: int
    answered_a_second: float
    """Answers with status 200 that came during the measurement."""
    statuses: dict[str, int]
    errors: dict[str, int]
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    per_second: list[Second]

    @property
    def failed(self) -> int:
        """Everything but an answer with status 200."""
        return self.requests - self.statuses.get(str(OK), 0)


class Tally:
    """When each request of one kind was planned, when it ended, and with which status."""

    def __init__(self) -> None:
        self.planned = array("d")
        self.ended = array("d")
        self.codes = array("h")

    def add(self, planned: float, ended: float, code: int) -> None:
        self.planned.append(planned)
        self.ended.append(ended)
        self.codes.append(code)


def kind_result(name: str, tally: Tally, *, start: float, seconds: float) -> KindResult:
    """One kind's figures."""
    latencies: list[list[float]] = [[] for _ in range(math.ceil(seconds))]
    failed = [0] * len(latencies)
    codes: Counter[int] = Counter()
    in_time = 0
    for plan, end, code in zip(tally.planned, tally.ended, tally.codes, strict=True):
        in_time += code == OK and start <= end < start + seconds
        if not start <= plan < start + seconds:
            continue
        codes[code] += 1
        second = int(plan - start)
        if code == OK:
            latencies[second].append(1000 * (end - plan))
        else:
            failed[second] += 1
    ordered = sorted(latency for each in latencies for latency in each)
    return KindResult(
        name=name,
        requests=codes.total(),
        answered_a_second=in_time / seconds,
        statuses={str(code): count for code, count in sorted(codes.items()) if code not in REASONS},
        errors={REASONS[code]: count for code, count in sorted(codes.items()) if code in REASONS},
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        max=quantile(ordered, 1.0),
        per_second=[
            Second(ok=len(each), failed=bad, p90=quantile(sorted(each), 0.9))
            for each, bad in zip(latencies, failed, strict=True)
        ],
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None
