from __future__ import annotations

from pathlib import Path

import pytest

from bench.serving.durability import Posted, count_faults, survive

KILLS = 1


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind; PostgreSQL is a real server."""
    return str(tmp_path / "events.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def test_acknowledged_events_survive_kill_nine(store: str, cycle_run: Path, tmp_path: Path) -> None:
    outcome = survive(store, cycle_run, folder=tmp_path, kills=KILLS, writers=4, seed=7, latest=0.4)
    assert outcome.acknowledged > 33 * KILLS
    assert outcome.repeated >= KILLS  # writers are active at every kill
    assert (outcome.missing, outcome.twice, outcome.unknown, outcome.split) == (0, 0, 0, 0)


def test_lost_and_repeated_events_are_counted() -> None:
    first, second, other = (Posted("u", (item, 1, None, None)) for item in "abc")
    assert count_faults([first, second], [second, first]) == (0, 0, 0)
    assert count_faults([first, second], [second]) == (1, 0, 0)
    assert count_faults([first, second], [first, second, second]) == (0, 1, 0)
    assert count_faults([first], [first, other]) == (0, 0, 1)
