from __future__ import annotations

import math

import numpy as np
import pytest
from tiny_logs import histories_of, sequences_of

from segue.data.sequences import Sequences
from segue.data.split import Split, split_last, split_time
from segue.evaluation.baselines import BASELINES, session_knn
from segue.evaluation.baselines.last_item import LastItem
from segue.evaluation.baselines.popularity import Popularity
from segue.evaluation.baselines.session_knn import SessionNeighbours
from segue.evaluation.split_log import SplitLog

TIE = 0.1 * math.log(2)  # the weight of popularity beside a vote, as a share of the most popular item's count plus one


def all_training(sequences: Sequences, n_items: int) -> SplitLog:
    ends = sequences.offsets[1:]
    return SplitLog(sequences, Split(offsets=sequences.offsets, train_end=ends, valid_end=ends), n_items)


def random_sequences(seed: int, *, users: int, n_items: int, longest: int) -> Sequences:
    rng = np.random.default_rng(seed)
    lists = [rng.integers(1, n_items + 1, size=rng.integers(1, longest + 1)).tolist() for _ in range(users)]
    times = [sorted(rng.integers(0, 50, size=len(items)).tolist()) for items in lists]
    return sequences_of(*lists, times=times)


def test_four_baselines_by_name() -> None:
    assert list(BASELINES) == ["popularity", "recent-popularity", "last-item", "session-knn"]


@pytest.mark.parametrize("name", BASELINES)
def test_held_out_items_change_no_baseline(name: str) -> None:
    """Baselines use no test item, and validation items only to select a window."""
    before = sequences_of([1, 2, 3, 4, 5], [2, 3, 1, 4, 5], [1, 2, 5, 3, 4])
    after = sequences_of([1, 2, 3, 4, 1], [2, 3, 1, 4, 2], [1, 2, 5, 3, 5])
    queries = histories_of([1, 2], [4], [3, 3, 5])
    one, other = (BASELINES[name](SplitLog(log, split_last(log), 5)).scores(queries) for log in (before, after))
    assert one.shape == (3, 6) and one.dtype == other.dtype
    assert one.equal(other)


@pytest.mark.parametrize("name", BASELINES)
def test_an_empty_training_part_scores_without_fault(name: str) -> None:
    sequences = sequences_of([1, 2], [2], times=[[5, 6], [7]])
    split = split_time(sequences, valid_from=0, test_from=6_000_000)
    assert BASELINES[name](SplitLog(sequences, split, 2)).scores(histories_of([1], [2, 1])).isfinite().all()


def test_popularity_counts_training_events() -> None:
    sequences = sequences_of([1, 2, 1, 3, 3], [2, 1, 3, 3])
    scores = Popularity.fit(SplitLog(sequences, split_last(sequences), 3)).scores(histories_of([1], [2]))
    assert scores[:, 1:].tolist() == [[3, 2, 0], [3, 2, 0]]


def test_recent_popularity_selects_the_best_window_on_validation() -> None:
    """1 and 2 were popular early, 3 recently, 6 last; the validation target after 6 is 3.

    Of the 93 training events the newest 0.3, 1 and 3 % are sixes alone, 10 % reach the threes, 30 % reach everything.
    """
    users = [[1, 2]] * 40 + [[3, 3]] * 5 + [[6, 3, 7]] * 3
    sequences = sequences_of(*users, times=[[0, 0]] * 40 + [[90, 90]] * 5 + [[91, 92, 93]] * 3)
    baseline = Popularity.fit_recent(SplitLog(sequences, split_last(sequences), 7))
    assert "newest 10.0% of training (chosen on validation)" in baseline.note
    popularity = np.array([40, 40, 10, 0, 0, 3, 0]) / 41  # breaks ties of the recent counts
    expected = np.array([0, 0, 10, 0, 0, 3, 0]) + popularity
    assert baseline.scores(histories_of([1], [2]))[1, 1:].numpy() == pytest.approx(expected, abs=1e-6)


def test_a_spread_of_cases_is_even_and_bounded() -> None:
    sequences = random_sequences(1, users=300, n_items=9, longest=9)
    cases = split_last(sequences).cases("test")
    assert len(cases.spread(10_000)) == len(cases)
    few = cases.spread(50)
    assert len(few) == 50 and few.users[0] == cases.users[0] and few.users[-1] == cases.users[-1]


def test_last_item_counts_transitions_within_users() -> None:
    sequences = sequences_of([1, 2, 1, 2, 3], [1, 3], [4, 1])
    scores = LastItem.fit(all_training(sequences, 5)).scores(histories_of([1], [3, 2], [5], [1, 4], [3]))
    popularity = np.array([4, 2, 2, 1, 0]) / 5  # of items 1 to 5
    assert scores[:, 1:].numpy() == pytest.approx(
        np.array(
            [
                [0, 2, 1, 0, 0],  # after 1: 2 twice, 3 once
                [1, 0, 1, 0, 0],  # after 2: 1 and 3
                [0, 0, 0, 0, 0],  # 5 is unseen in training: popularity alone
                [1, 0, 0, 0, 0],  # after 4: 1
                [0, 0, 0, 0, 0],  # 3 was always the last: 1 and 4 are other users' first
            ]
        )
        + popularity,
        abs=1e-6,
    )


def test_session_neighbours_by_hand() -> None:
    sequences = sequences_of([1, 2, 3], [2, 4], [5, 6], times=[[0, 1, 2], [3, 4], [5, 6]])
    scores = SessionNeighbours.fit(all_training(sequences, 6)).scores(histories_of([1, 2], [6]))
    rare, common = math.log(1 + 3 / 1), math.log(1 + 3 / 2)  # item 2 is in two of three sessions
    ties = np.array([1, 2, 1, 1, 1, 1]) / 3 * TIE
    # [1, 2]: the first session shares both (2 + 1 = 3), the second only the newest (2); the newest position weighs 1
    expected = [3 * rare, (3 + 2) * common, 3 * rare, 2 * rare, 0, 0]
    assert scores[0, 1:].numpy() == pytest.approx(np.array(expected) + ties, abs=1e-5)
    # [6]: the third session alone, similarity 1
    assert scores[1, 1:].numpy() == pytest.approx(np.array([0, 0, 0, 0, rare, rare]) + ties, abs=1e-5)


def test_the_planted_neighbour_wins() -> None:
    noise = np.random.default_rng(2).integers(1, 40, size=(60, 6)).tolist()
    sequences = sequences_of(*noise, [41, 42, 43, 44, 50])
    scores = SessionNeighbours.fit(all_training(sequences, 50)).scores(histories_of([41, 42, 43, 44]))
    assert int(scores[0, 45:].argmax()) + 45 == 50
    assert scores[0, 50] > scores[0, 1:41].max()


def plain_neighbours(sequences: Sequences, n_items: int, query: list[int]) -> np.ndarray:
    """The same definition in loops over sets, one query at a time."""
    sessions = []
    for user in range(sequences.n_users):
        rows = range(sequences.offsets[user], sequences.offsets[user + 1])
        for begin in range(0, len(rows), session_knn.PIECE):
            piece = rows[begin : begin + session_knn.PIECE]
            sessions.append((int(sequences.times[piece[-1]]), {int(sequences.items[row]) for row in piece}))
    sessions.sort(key=lambda session: session[0])
    newest = query[::-1][: session_knn.NEWEST]
    positions = {item: newest.index(item) for item in newest}
    similarity: dict[int, tuple[int, int]] = {}
    for item, position in positions.items():
        holders = [number for number, (_, items) in enumerate(sessions) if item in items][::-1][: session_knn.SESSIONS]
        for number in holders:
            total, best = similarity.get(number, (0, 99))
            similarity[number] = (total + len(newest) - position, min(best, position))
    nearest = sorted(similarity, key=lambda number: (-similarity[number][0], -number))[: session_knn.NEIGHBOURS]
    counts = np.bincount(sequences.items, minlength=n_items + 1)
    scores: np.ndarray = counts / (counts.max() + 1) * TIE
    for number in nearest:
        total, position = similarity[number]
        for item in sessions[number][1]:
            holders_of = sum(item in items for _, items in sessions)
            scores[item] += total * (1 - position / session_knn.NEWEST) * math.log(1 + len(sessions) / holders_of)
    return scores


@pytest.mark.parametrize("pairs", [4_000_000, 30])
def test_session_neighbours_equal_plain_loops(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIECE", 4), ("NEWEST", 5), ("SESSIONS", 6), ("NEIGHBOURS", 7), ("PAIRS_AT_A_TIME", pairs)):
        monkeypatch.setattr(session_knn, name, value)
    sequences = random_sequences(3, users=40, n_items=12, longest=11)
    histories = [items.tolist() for items in np.split(sequences.items, sequences.offsets[1:-1])]
    queries = [*histories[:15], [13], [13, 1]]  # 13 is unseen in training
    scores = SessionNeighbours.fit(all_training(sequences, 13)).scores(histories_of(*queries))
    for row, items in zip(scores.numpy(), queries, strict=True):
        assert row[1:] == pytest.approx(plain_neighbours(sequences, 13, items)[1:], rel=1e-5)
