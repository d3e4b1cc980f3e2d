from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from settings_tables import model_settings
from tiny_logs import HistoryFirst, Table, histories_of, ranks, sequences_of

from segue.config.settings import make_settings
from segue.data.sequences import Sequences
from segue.data.split import Split, split_last, split_time
from segue.errors import InputError, SettingsError
from segue.evaluation import evaluator
from segue.evaluation.evaluate import Evaluation, evaluate
from segue.evaluation.evaluator import Evaluator, ModelScorer, top_items
from segue.evaluation.ranks import MISS, Exclusions
from segue.evaluation.settings import EvaluateSettings, repeat_share, seen_rule
from segue.evaluation.split_log import SplitLog
from segue.layers.packed import tensors
from segue.models.build import build_model

N_ITEMS = 9
REPEATS = ([1, 2, 3, 2, 3], [4, 5, 4, 5, 4], [1, 6, 7, 6, 1])  # every held-out item is in its history


def random_log(seed: int, *, users: int = 40, n_items: int = 30) -> Sequences:
    rng = np.random.default_rng(seed)
    return sequences_of(*(rng.integers(1, n_items + 1, size=rng.integers(3, 15)).tolist() for _ in range(users)))


def report_of(
    scorer: HistoryFirst | Table,
    sequences: Sequences,
    *,
    seen: Literal["auto", "exclude", "keep"] = "exclude",
    split: Split | None = None,
    n_items: int = N_ITEMS,
    at: tuple[int, ...] = (1, 10),
) -> Evaluation:
    settings = EvaluateSettings(seen=seen, at=at, bootstrap=20)
    return evaluate(
        scorer,
        SplitLog(sequences, split_last(sequences) if split is None else split, n_items),
        settings=settings,
        baselines=False,
    )


def test_training_ends_at_the_first_cut() -> None:
    sequences = sequences_of([1, 2, 3, 4], [5, 6], [1, 7, 8])
    split = split_last(sequences)
    assert SplitLog(sequences, split, N_ITEMS).training_rows.tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 0]
    assert SplitLog(sequences, split, N_ITEMS).training_counts.tolist() == [0, 2, 1, 0, 0, 1, 1, 0, 0, 0]


def test_users_who_start_later_have_no_training_events() -> None:
    sequences = sequences_of([1, 2], [3, 4], [5, 6], times=[[0, 9], [8, 9], [9, 9]])
    split = split_time(sequences, valid_from=5_000_000, test_from=9_000_000)
    assert SplitLog(sequences, split, N_ITEMS).training_rows.tolist() == [1, 0, 0, 0, 0, 0]


def test_a_model_that_knows_the_answer_is_always_right() -> None:
    """Each user's items are consecutive numbers, so the last item determines the next."""
    sequences = sequences_of(*(list(range(start, start + 5)) for start in (1, 2, 3, 4, 5) for _ in range(2)))
    table = torch.zeros(10, 10)
    table[torch.arange(9), torch.arange(9) + 1] = 1
    report = report_of(Table(table), sequences).report
    assert report.metrics["hit@1"] == report.metrics["ndcg@10"] == report.metrics["mrr@1"] == 1 - report.unknown / 10
    assert report.unknown == 4  # items 8 and 9 are unseen in training


def test_a_constant_scorer_hits_nothing() -> None:
    sequences = random_log(1, users=60)
    evaluation = report_of(Table(torch.zeros(31, 31)), sequences, n_items=30)
    assert evaluation.report.metrics["hit@10"] == 0
    cases = split_last(sequences).cases("test")
    training_items = set(sequences.items[SplitLog(sequences, split_last(sequences), 30).training_rows].tolist())
    for index, (start, row) in enumerate(zip(cases.starts, cases.targets, strict=True)):
        candidates = training_items - set(sequences.items[start:row].tolist())
        assert evaluation.ranks[index] == (len(candidates) if int(sequences.items[row]) in candidates else MISS)


def test_a_scorer_of_random_numbers_hits_k_of_v() -> None:
    n_items, rng = 50, np.random.default_rng(2)
    sequences = sequences_of(*(rng.permutation(n_items)[:5].tolist() for _ in range(3_000)))
    sequences = sequences_of(*((sequences.items.reshape(-1, 5) + 1).tolist()))

    class Random:
        def scores(self, histories: object) -> torch.Tensor:
            return torch.from_numpy(rng.random((len(histories.lengths), n_items + 1), dtype=np.float32))  # type: ignore[attr-defined]

    counts = SplitLog(sequences, split_last(sequences), n_items).training_counts
    result = Evaluator(sequences=sequences, counts=counts, seen="excluded").ranks(
        Random(), split_last(sequences).cases("test")
    )
    share = 10 / (n_items - 4)
    assert (result <= 10).mean() == pytest.approx(share, abs=4 * (share * (1 - share) / 3_000) ** 0.5)


def test_the_seen_filter_on_a_log_of_repeats() -> None:
    """V15: a scorer that ranks the history first hits every target or none."""
    sequences = sequences_of(*([items[0], *items] for items in REPEATS))
    unfiltered = report_of(HistoryFirst(N_ITEMS), sequences, seen="keep", at=(3,)).report
    assert unfiltered.seen == "kept" and unfiltered.metrics["hit@3"] == 1 and unfiltered.unreachable == 0
    filtered = report_of(HistoryFirst(N_ITEMS), sequences, seen="exclude", at=(3,)).report
    assert filtered.seen == "excluded" and filtered.metrics["hit@3"] == 0
    assert filtered.unreachable == 3 and filtered.unknown == 0


def test_the_seen_filter_covers_events_outside_the_models_window() -> None:
    sequences = sequences_of([1, 2, 3, 4, 5, 2, 1], [1, 2, 3, 4, 5, 6, 7])
    model = build_model(model_settings(width=8, depth=1, length=2), 7, generator=torch.Generator().manual_seed(0))
    counts = SplitLog(sequences, split_last(sequences), 7).training_counts
    result = Evaluator(sequences=sequences, counts=counts, seen="excluded").ranks(
        ModelScorer(model), split_last(sequences).cases("test")
    )
    assert result[0] == MISS  # item 1 is six events old
    assert result[1] == MISS  # item 7 is unseen in training


@pytest.mark.parametrize(("positions", "begin"), [("oldest", 2), ("newest", 1)])
def test_a_model_is_measured_on_the_window_that_it_serves_from(positions: str, begin: int) -> None:
    """Nine events, length eight: if a new event can be encoded alone, the window has moved by a quarter."""
    settings = model_settings(width=8, depth=1, length=8, positions=positions)
    model = build_model(settings, 9, generator=torch.Generator().manual_seed(0)).eval()
    history = histories_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    window = history.tokens(np.arange(begin, 9), np.array([9 - begin]))
    with torch.inference_mode():
        expected = model.score_all(model.query(tensors(window)))
    torch.testing.assert_close(ModelScorer(model).scores(history), expected)


def test_unknown_comes_before_unreachable() -> None:
    """Item 9 is only ever held out: as validation it enters the history, as test it is unknown, not unreachable."""
    report = report_of(HistoryFirst(N_ITEMS), sequences_of([1, 2, 9, 9], [1, 2, 3, 1])).report
    assert (report.unknown, report.unreachable) == (1, 1)


def test_an_unknown_item_is_no_candidate() -> None:
    sequences = sequences_of([1, 2, 9, 3], [3, 1, 2, 1])
    table = torch.zeros(10, 10)
    table[:, 9], table[:, 3] = 5, 1
    counts = SplitLog(sequences, split_last(sequences), N_ITEMS).training_counts
    result = Evaluator(sequences=sequences, counts=counts, seen="kept").ranks(
        Table(table), split_last(sequences).cases("test")
    )
    assert result[0] == 1


def test_cases_without_history_are_answered_by_popularity() -> None:
    sequences = sequences_of([1, 2, 1, 3], [1, 2, 3], [3, 2], [2], times=[[0, 1, 2, 6], [0, 1, 7], [8, 9], [9]])
    split = split_time(sequences, valid_from=5_000_000, test_from=8_000_000)
    counts = SplitLog(sequences, split, 3).training_counts
    assert counts.tolist() == [0, 3, 2, 0]
    scorer = Table(torch.ones(4, 4))
    evaluation = report_of(scorer, sequences, split=split, n_items=3, at=(1, 2))
    assert (
        evaluation.report.split == "time" and evaluation.report.without_history == 2 and evaluation.report.unknown == 1
    )
    assert evaluation.ranks.tolist() == [MISS, 2, 2]  # 3 is unknown; 2 after [3] ties with 1; 2 is second in popularity
    assert all(batch.lengths.min() > 0 for batch in scorer.calls)


def test_scorers_get_the_target_time_only_if_the_report_says_so() -> None:
    sequences = random_log(3)
    counts, cases = SplitLog(sequences, split_last(sequences), 30).training_counts, split_last(sequences).cases("test")
    for target_time in (False, True):
        scorer = Table(torch.zeros(31, 31))
        Evaluator(sequences=sequences, counts=counts, seen="kept", target_time=target_time).ranks(scorer, cases)
        assert all((batch.query_times is not None) == target_time for batch in scorer.calls)


def test_chunked_equals_unchunked(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = random_log(4)
    scorer = Table(torch.randn(31, 31, generator=torch.Generator().manual_seed(4)).round(decimals=1))
    whole = report_of(scorer, sequences, n_items=30)
    scorer.calls.clear()
    monkeypatch.setattr(evaluator, "MOST_SCORES", 31 * 3)  # three cases at a time
    chunked = report_of(scorer, sequences, n_items=30)
    assert max(len(batch.lengths) for batch in scorer.calls) == 3
    assert np.array_equal(whole.ranks, chunked.ranks) and whole.report == chunked.report


def test_validation_is_ranked_by_the_same_rules() -> None:
    sequences = random_log(5)
    split = split_last(sequences)
    counts, cases = SplitLog(sequences, split, 30).training_counts, split.cases("valid")
    table = torch.randn(31, 31, generator=torch.Generator().manual_seed(5))
    result = Evaluator(sequences=sequences, counts=counts, seen="excluded").ranks(Table(table), cases, tokens=20)
    for index, (start, row) in enumerate(zip(cases.starts, cases.targets, strict=True)):
        history = sequences.items[start:row].astype(np.int64)
        seen = Exclusions(rows=np.zeros(len(history), dtype=np.int64), items=history)
        alone = ranks(table[history[-1:]], sequences.items[row : row + 1], seen, known=counts > 0)
        assert result[index] == alone[0]


def test_a_model_is_measured_without_dropout_and_stays_in_its_mode() -> None:
    model = build_model(model_settings(width=8, depth=1, length=4, dropout=0.5), 9, generator=torch.Generator())
    model.train()
    batch = histories_of([1, 2, 3], [4])
    scores = ModelScorer(model).scores(batch)
    assert model.training and torch.equal(scores, ModelScorer(model).scores(batch))
    model.eval()
    with torch.no_grad():
        assert torch.equal(scores, model.score_all(model.query(tensors(batch))))


def test_lists_are_the_best_candidates_and_zero_if_none_remain() -> None:
    excluded = -torch.inf
    scores = torch.tensor([[excluded, 0.1, 0.3, 0.2], [excluded, excluded, 0.5, excluded]])
    assert top_items(scores, 2).tolist() == [[2, 3], [2, 0]]
    assert top_items(scores, 50).tolist() == [[2, 3, 1, 0], [2, 0, 0, 0]]


def test_targets_of_a_split_in_time() -> None:
    sequences = sequences_of([1, 2, 3, 1, 2], [2, 3, 1], times=[[0, 1, 5, 8, 9], [0, 5, 9]])
    split = split_time(sequences, valid_from=5_000_000, test_from=8_000_000)
    for target, cases in (("each", 3), ("first", 2), ("last", 2)):
        settings = EvaluateSettings(target=target, bootstrap=0, at=(1,))  # type: ignore[arg-type]
        scorer = Table(torch.zeros(4, 4))
        evaluation = evaluate(scorer, SplitLog(sequences, split, 3), settings=settings, baselines=False)
        assert evaluation.report.cases == cases == len(evaluation.ranks)
        assert evaluation.report.target == target and evaluation.report.intervals == {}


def test_seen_items_are_kept_if_more_than_one_target_in_twenty_repeats() -> None:
    fresh = [1, 2, 3, 4, 5]
    repeat = [1, 2, 3, 1, 5]  # the validation target was seen, the test target was not
    for repeats, rule in ((5, "excluded"), (6, "kept")):
        sequences = sequences_of(*([repeat] * repeats), *([fresh] * (100 - repeats)))
        split = split_last(sequences)
        assert seen_rule(EvaluateSettings(), sequences, split) == (rule, repeats / 100)
        assert seen_rule(EvaluateSettings(seen="keep"), sequences, split)[0] == "kept"
        assert seen_rule(EvaluateSettings(seen="exclude"), sequences, split)[0] == "excluded"
        assert repeat_share(sequences, split.cases("test")) == 0


def test_a_split_without_cases_is_refused() -> None:
    with pytest.raises(InputError, match="test part has no cases"):
        report_of(HistoryFirst(N_ITEMS), sequences_of([1, 2], [3]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.at=[0, 10]", r"evaluate\.at\[0\]: expected a whole number >= 1, got 0"),
        ("evaluate.at=[]", r"evaluate\.at: expected a list of 1 or more whole numbers >= 1, got \[\]"),
        ("evaluate.bootstrap=-1", r"evaluate\.bootstrap: expected a whole number >= 0, got -1"),
        ("evaluate.days=-1", r"evaluate\.days: expected a number >= 0"),
        ("evaluate.days=40000", r"evaluate\.days: expected a number >= 0 and <= 36525"),
    ],
)
def test_invalid_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_settings({}, [override])
