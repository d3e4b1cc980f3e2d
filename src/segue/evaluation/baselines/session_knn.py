"""Session k-nearest-neighbours: the items of the training sessions most similar to the history.

Like VMIS-kNN (Kersbergen, Sprangers, Schelter: Serenade, SIGMOD 2022). An inverted index lists, for each item, the most
recent sessions that hold it. The history's newest items look up their sessions. A session's similarity is the sum over
the shared items, newer ones weighing more. The most similar sessions, the more recent first among equals, vote for
their items. A vote is weighted by the similarity, by how new the newest shared item is, and by the item's rarity. Items
of no neighbour follow by popularity.

A session is at most PIECE consecutive events of a user's training part, so a long history is many sessions instead of
one that is similar to everything. All steps work on integers packed into sortable keys: no Python loop runs over events
or queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from segue.data.batch import Batch, cut_by_budget, newest, ragged_rows
from segue.evaluation.baselines.popularity import below_one
from segue.evaluation.split_log import SplitLog

PIECE = 30  # events of a session
NEWEST = 10  # newest events of the history, which are looked up
SESSIONS = 500  # most recent sessions of an item in the index
NEIGHBOURS = 100
PAIRS_AT_A_TIME = 4_000_000  # (query, session) pairs in memory together

QUERY_BITS, SIMILARITY_BITS, SESSION_BITS, POSITION_BITS = 19, 6, 34, 4  # of a sortable key, 63 in all
MOST_SIMILARITY = (1 << SIMILARITY_BITS) - 1  # 1 + 2 + … + NEWEST is at most 55
LEAST_VOTE = 0.1 * np.log(2)  # similarity 1, the oldest position, the most frequent item: popularity stays below it


@dataclass(frozen=True, slots=True, eq=False)
class SessionNeighbours:
    """The training sessions, numbered by age: a higher number is more recent."""

    sessions: np.ndarray  # [P] int64: item a's sessions, most recent first, are rows by_item[a] .. by_item[a + 1]
    by_item: np.ndarray  # [V + 2] int64
    items: np.ndarray  # [Q] int64: session s's distinct items are rows by_session[s] .. by_session[s + 1]
    by_session: np.ndarray  # [S + 1] int64
    rarity: np.ndarray  # [V + 1] float32
    popularity: Tensor  # [V + 1] float32, below any vote
    note: str = (
        f"the {NEIGHBOURS} training sessions nearest to the newest {NEWEST} items vote; "
        f"longer sequences are cut into sessions of {PIECE} events"
    )

    @staticmethod
    def fit(log: SplitLog) -> SessionNeighbours:
        (session, item, n_sessions), columns = _sessions(log), log.n_items + 1
        pairs = np.unique(session * columns + item)  # each item of a session once, by session
        session, item = pairs // columns, pairs % columns
        counts = np.bincount(item, minlength=columns)  # [V + 1]: sessions of each item
        in_order = np.sort(item * n_sessions + (n_sessions - 1 - session))  # by item, most recent session first
        item_of = in_order // max(1, n_sessions)
        first = np.cumsum(counts) - counts
        recent = np.arange(len(in_order)) - first[item_of] < SESSIONS
        return SessionNeighbours(
            sessions=n_sessions - 1 - in_order[recent] % max(1, n_sessions),
            by_item=np.concatenate(([0], np.cumsum(np.minimum(counts, SESSIONS)))),
            items=item,
            by_session=np.concatenate(([0], np.cumsum(np.bincount(session, minlength=n_sessions)))),
            rarity=np.log1p(n_sessions / np.maximum(1, counts)).astype(np.float32),
            popularity=below_one(log.training_counts) * float(LEAST_VOTE),
        )

    def scores(self, histories: Batch) -> Tensor:
        query, item, position, lengths = _newest_positions(histories, len(self.rarity))
        sizes = self.by_item[item + 1] - self.by_item[item]  # sessions of each looked-up item
        scores = self.popularity.repeat(len(lengths), 1)  # [B, V + 1]
        pairs = np.bincount(query, weights=sizes, minlength=len(lengths)).astype(np.int64)
        for group in cut_by_budget(pairs, PAIRS_AT_A_TIME):
            rows = slice(*np.searchsorted(query, (group[0], group[-1] + 1)))
            sessions = self.sessions[ragged_rows(self.by_item[item[rows]], sizes[rows])]
            queries, positions = (np.repeat(column[rows], sizes[rows]) for column in (query - group[0], position))
            owner, session, weight = _nearest(queries, sessions, positions, lengths[group])
            lists = self.by_session[session + 1] - self.by_session[session]  # items of each neighbour
            votes = self.items[ragged_rows(self.by_session[session], lists)]
            cells = np.repeat((owner + group[0]) * scores.shape[1], lists) + votes
            np.add.at(scores.numpy().reshape(-1), cells, np.repeat(weight, lists) * self.rarity[votes])
        return scores


def _sessions(log: SplitLog) -> tuple[np.ndarray, np.ndarray, int]:
    """(session of each training event, its item, number of sessions); sessions in the order of their last events."""
    rows, offsets = np.flatnonzero(log.training_rows), np.asarray(log.split.offsets)
    user = np.searchsorted(offsets, rows, side="right") - 1
    begins = (rows - offsets[user]) % PIECE == 0
    piece = np.cumsum(begins) - 1
    if not len(rows):
        return piece, rows, 0
    last = np.append(np.flatnonzero(begins)[1:], len(rows)) - 1  # each piece's last event, which is its newest
    by_age = np.empty(len(last), dtype=np.int64)
    by_age[np.argsort(log.sequences.times[rows[last]], kind="stable")] = np.arange(len(last))
    return by_age[piece], log.sequences.items[rows].astype(np.int64), len(last)


def _newest_positions(histories: Batch, n_columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(query, item, position) of the newest events, and their number for each query.

    Position 0 is the newest event; a repeated item has its newest position alone.
    """
    cut = newest(histories, NEWEST)
    owner = np.repeat(np.arange(len(cut.lengths)), cut.lengths)
    position = np.repeat(np.cumsum(cut.lengths), cut.lengths) - 1 - np.arange(len(owner))
    keys = np.sort((owner * n_columns + cut.items) << POSITION_BITS | position)
    first = np.append(True, keys[1:] >> POSITION_BITS != keys[:-1] >> POSITION_BITS)[: len(keys)]
    keys, position = keys[first] >> POSITION_BITS, keys[first] & ((1 << POSITION_BITS) - 1)
    return keys // n_columns, keys % n_columns, position, cut.lengths


def _nearest(
    query: np.ndarray, session: np.ndarray, position: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest sessions of each query, as (query, session, weight of its votes).

    The arguments are pairs of query and session with the position of an item they share, and the queries' lengths.
    """
    assert len(lengths) < 1 << QUERY_BITS
    positions = (1 << POSITION_BITS) - 1
    keys = (query << SESSION_BITS | session) << POSITION_BITS | position
    keys.sort()
    pair, position = keys >> POSITION_BITS, keys & positions
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    if not len(first):
        return pair, pair, np.zeros(0, dtype=np.float32)
    # An item counts the more the newer it is: the history's length for the newest.
    similarity = np.add.reduceat(lengths[pair >> SESSION_BITS] - position, first)
    query, session, position = pair[first] >> SESSION_BITS, pair[first] & ((1 << SESSION_BITS) - 1), position[first]

    recency = (1 << SESSION_BITS) - 1 - session  # lower is more recent
    best_first = query << SIMILARITY_BITS | (MOST_SIMILARITY - similarity)
    keys = (best_first << SESSION_BITS | recency) << POSITION_BITS | position
    keys.sort()
    query = keys >> (SIMILARITY_BITS + SESSION_BITS + POSITION_BITS)
    begin = np.searchsorted(query, np.arange(len(lengths)))
    nearest = np.arange(len(keys)) - begin[query] < NEIGHBOURS
    keys, query = keys[nearest], query[nearest]
    session = (1 << SESSION_BITS) - 1 - (keys >> POSITION_BITS & ((1 << SESSION_BITS) - 1))
    similarity = MOST_SIMILARITY - (keys >> (POSITION_BITS + SESSION_BITS) & MOST_SIMILARITY)
    return query, session, (similarity * (1 - (keys & positions) / NEWEST)).astype(np.float32)
