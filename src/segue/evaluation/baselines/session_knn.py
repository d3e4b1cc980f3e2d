"""Sessions like this one: what else did the nearest training sessions hold?

In the manner of VMIS-kNN (Kersbergen, Sprangers, Schelter: Serenade, SIGMOD 2022). An inverted index knows, for each
item, the most recent sessions that hold it. A question's newest items look up their sessions; a session's similarity
adds up the items it shares, newer ones weighing more; the most similar ones, the more recent first among equals,
vote for their items, each vote weighted by the similarity, by how new the newest shared item is, and by the item's
rarity. What no neighbour holds follows by popularity.

A session is a user's training part cut into consecutive pieces of at most PIECE events, so that a long history is
many sessions, not one that resembles everything. Everything is integers packed into sortable keys: no event and no
question passes through a Python loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from segue.data.batch import Batch, cut_by_budget, newest, ragged_rows
from segue.data.sequences import Sequences
from segue.data.split import Split
from segue.evaluation.baselines.popularity import below_one
from segue.evaluation.training_counts import training_counts, training_rows

PIECE = 30  # events of a session
NEWEST = 10  # events of the question that are looked up
SESSIONS = 500  # most recent sessions an item is known by
NEIGHBOURS = 100
PAIRS_AT_A_TIME = 4_000_000  # (question, session) pairs in memory together

QUESTION_BITS, LIKENESS_BITS, SESSION_BITS, PLACE_BITS = 19, 6, 34, 4  # of a sortable key, 63 in all
MOST_LIKENESS = (1 << LIKENESS_BITS) - 1  # 1 + 2 + … + NEWEST is at most 55
LEAST_VOTE = 0.1 * np.log(2)  # likeness 1, the oldest place, the commonest item: popularity stays below it


@dataclass(frozen=True, slots=True, eq=False)
class SessionNeighbours:
    """Sessions are numbered by age: the higher, the more recent."""

    sessions: np.ndarray  # [P] int64: item a's sessions, most recent first, are rows known[a] .. known[a + 1]
    known: np.ndarray  # [V + 2] int64
    items: np.ndarray  # [Q] int64: session s's distinct items are rows held[s] .. held[s + 1]
    held: np.ndarray  # [S + 1] int64
    rarity: np.ndarray  # [V + 1] float32
    popularity: Tensor  # [V + 1] float32, below any vote
    note: str = (
        f"the {NEIGHBOURS} training sessions nearest to the newest {NEWEST} items vote; "
        f"longer sequences are cut into sessions of {PIECE} events"
    )

    @staticmethod
    def fit(sequences: Sequences, split: Split, n_items: int) -> SessionNeighbours:
        session, item, n_sessions = _sessions(sequences, split)
        held = np.unique(session * (n_items + 1) + item)  # each item of a session once, by session
        session, item = held // (n_items + 1), held % (n_items + 1)
        holders = np.bincount(item, minlength=n_items + 1)  # [V + 1]
        by_item = np.sort(item * n_sessions + (n_sessions - 1 - session))  # by item, most recent session first
        item_of = by_item // max(1, n_sessions)
        first = np.cumsum(holders) - holders
        recent = np.arange(len(by_item)) - first[item_of] < SESSIONS
        popularity = below_one(training_counts(sequences, split, n_items)) * float(LEAST_VOTE)
        return SessionNeighbours(
            sessions=n_sessions - 1 - by_item[recent] % max(1, n_sessions),
            known=np.concatenate(([0], np.cumsum(np.minimum(holders, SESSIONS)))),
            items=item,
            held=np.concatenate(([0], np.cumsum(np.bincount(session, minlength=n_sessions)))),
            rarity=np.log1p(n_sessions / np.maximum(1, holders)).astype(np.float32),
            popularity=popularity,
        )

    def scores(self, histories: Batch) -> Tensor:
        question, item, place, lengths = _newest_places(histories, len(self.rarity))
        found = self.known[item + 1] - self.known[item]  # sessions of each looked-up item
        scores = self.popularity.repeat(len(lengths), 1)  # [B, V + 1]
        pairs = np.bincount(question, weights=found, minlength=len(lengths)).astype(np.int64)
        for group in cut_by_budget(pairs, PAIRS_AT_A_TIME):
            rows = slice(*np.searchsorted(question, (group[0], group[-1] + 1)))
            sessions = self.sessions[ragged_rows(self.known[item[rows]], found[rows])]
            asker, places = (np.repeat(column[rows], found[rows]) for column in (question - group[0], place))
            neighbours = _nearest(asker, sessions, places, lengths[group])
            self._vote(scores[group[0] : group[-1] + 1].numpy(), *neighbours)
        return scores

    def _vote(self, scores: np.ndarray, question: np.ndarray, session: np.ndarray, weight: np.ndarray) -> None:
        """Add each neighbour's votes to the question's row of the scores [b, V + 1], in place."""
        sizes = self.held[session + 1] - self.held[session]
        items = self.items[ragged_rows(self.held[session], sizes)]
        cells = np.repeat(question * scores.shape[1], sizes) + items
        np.add.at(scores.reshape(-1), cells, np.repeat(weight, sizes) * self.rarity[items])


def _sessions(sequences: Sequences, split: Split) -> tuple[np.ndarray, np.ndarray, int]:
    """(session of each training event, its item, number of sessions); sessions numbered by their last event's time."""
    rows = np.flatnonzero(training_rows(split, sequences.n_events))
    offsets = np.asarray(split.offsets)
    user = np.searchsorted(offsets, rows, side="right") - 1
    begins = (rows - offsets[user]) % PIECE == 0
    piece = np.cumsum(begins) - 1
    if not len(rows):
        return piece, rows, 0
    last = np.append(np.flatnonzero(begins)[1:], len(rows)) - 1  # each piece's last event, which is its newest
    by_age = np.empty(len(last), dtype=np.int64)
    by_age[np.argsort(sequences.times[rows[last]], kind="stable")] = np.arange(len(last))
    return by_age[piece], sequences.items[rows].astype(np.int64), len(last)


def _newest_places(histories: Batch, n_columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(question, item, place) of the newest events, an item once at its newest place (0), and events a question."""
    cut = newest(histories, NEWEST)
    owner = np.repeat(np.arange(len(cut.lengths)), cut.lengths)
    place = np.repeat(np.cumsum(cut.lengths), cut.lengths) - 1 - np.arange(len(owner))
    keys = np.sort((owner * n_columns + cut.items) << PLACE_BITS | place)
    first = np.append(True, keys[1:] >> PLACE_BITS != keys[:-1] >> PLACE_BITS)[: len(keys)]
    keys, place = keys[first] >> PLACE_BITS, keys[first] & ((1 << PLACE_BITS) - 1)
    return keys // n_columns, keys % n_columns, place, cut.lengths


def _nearest(
    question: np.ndarray, session: np.ndarray, place: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs with the place of a shared item → (question, session, weight of its votes) of the nearest sessions."""
    assert len(lengths) < 1 << QUESTION_BITS
    places = (1 << PLACE_BITS) - 1
    keys = (question << SESSION_BITS | session) << PLACE_BITS | place
    keys.sort()
    pair, place = keys >> PLACE_BITS, keys & places
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    if not len(first):
        return pair, pair, np.zeros(0, dtype=np.float32)
    likeness = np.add.reduceat(lengths[pair >> SESSION_BITS] - place, first)  # the newest item counts its length
    question, session, place = pair[first] >> SESSION_BITS, pair[first] & ((1 << SESSION_BITS) - 1), place[first]

    youth = (1 << SESSION_BITS) - 1 - session
    keys = ((question << LIKENESS_BITS | (MOST_LIKENESS - likeness)) << SESSION_BITS | youth) << PLACE_BITS | place
    keys.sort()
    question = keys >> (LIKENESS_BITS + SESSION_BITS + PLACE_BITS)
    begin = np.searchsorted(question, np.arange(len(lengths)))
    kept = np.arange(len(keys)) - begin[question] < NEIGHBOURS
    keys, question = keys[kept], question[kept]
    session = (1 << SESSION_BITS) - 1 - (keys >> PLACE_BITS & ((1 << SESSION_BITS) - 1))
    likeness = MOST_LIKENESS - (keys >> (PLACE_BITS + SESSION_BITS) & MOST_LIKENESS)
    return question, session, (likeness * (1 - (keys & places) / NEWEST)).astype(np.float32)
