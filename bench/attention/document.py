"""docs/attention.md: its words are in document.template.md, its numbers are computed here.

`python -m bench.attention.document` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.attention.model import BOUGHT_NEXT, HISTORY, SHAPE, ShopModel, read_model, recommender
from segue.demo.shop import CREDIT
from segue.layers.attention.scores import Additive, Bilinear, Product
from segue.layers.attention.weights import select_weights
from segue.layers.blocks.transformer import SASRecBlock
from segue.layers.packed import PackedBatch
from segue.layers.positions.embeddings import sinusoids
from segue.layers.positions.relative import Rotary, distance_buckets
from segue.recommend.explain.text import View, attention_lines
from segue.recommend.recommender import Recommender

TEMPLATE = Path(__file__).with_suffix(".template.md")
DOCUMENT = Path(__file__).parents[2] / "docs" / "attention.md"
NOTE = "<!-- Made by `make attention` from bench/attention/document.template.md: edit that. -->\n"
MINUS = "−"


def document() -> str:
    """The whole document."""
    with torch.no_grad():
        values = exercise() | walk(read_model()) | variants()
    text = TEMPLATE.read_text(encoding="utf-8")
    names = set(re.findall(r"\{([a-z0-9_]+)\}", text))
    assert names == set(values), f"the template and the numbers differ: {sorted(names ^ set(values))}"
    return NOTE + re.sub(r"\{([a-z0-9_]+)\}", lambda match: values[match[1]], text)


# --- numbers as text ------------------------------------------------------------------------------------------------


def number(value: float, decimals: int) -> str:
    """With a real minus; zero has no sign."""
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", MINUS)


def row(values: Iterable[float], decimals: int) -> str:
    return f"({', '.join(number(value, decimals) for value in values)})"


def short(values: Iterable[float]) -> str:
    """Numbers that are short by themselves."""
    return f"({', '.join(f'{value:g}'.replace('-', MINUS) for value in values)})"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def masked_softmax(scores: Tensor, may_attend: Tensor | None = None) -> Tensor:
    return select_weights(scores, may_attend, "soft", temperature=1.0, training=False, generator=None).weights


# --- the exercise ---------------------------------------------------------------------------------------------------

WORDS = ("START", "Awful", "plot", "and", "actors.", "The", "movie", "is")
EMBEDDED = ((0, 0, 0), (0, -5, 0), (1, 0, 0), (0, 0, 0), (-1, 0, 0), (0, 0, 0), (-2, 0, 0), (0, 0, 0))
PROJECTION = ((0.1, 0.0), (0.0, -0.1), (0.0, 0.1))
OUTPUTS = {"good": (1.0, -1.0), "bad": (-1.0, 1.0)}


def exercise() -> dict[str, str]:
    """The exercise of eight words."""
    positions = torch.arange(len(WORDS), dtype=torch.float64)
    x = torch.tensor(EMBEDDED, dtype=torch.float64)
    x[:, 2] += positions
    q = x @ torch.tensor(PROJECTION, dtype=torch.float64)  # and k, and v
    scores = Product(2, scaled=True)(q, q)
    causal = torch.ones(len(WORDS), len(WORDS), dtype=torch.bool).tril()
    weights = masked_softmax(scores, causal)
    mixtures = weights @ q
    logits = torch.tensor([*OUTPUTS.values()], dtype=torch.float64) @ mixtures[-1]
    assert torch.equal(masked_softmax(scores)[-1], weights[-1])
    return _leak() | {
        "g1_words": table(
            ["", *WORDS],
            [["X", *map(short, x.tolist())], ["Q = K = V", *(row(own, 1) for own in q.tolist())]],
        ),
        "g1_scores": _by_word(scores[-1]),
        "g1_weights": _by_word(weights[-1]),
        "g1_mixture": row(mixtures[-1].tolist(), 6),
        "g1_logits": _named(logits),
        "g1_chances": _named(logits.softmax(0)),
        "g1_answer": [*OUTPUTS][int(logits.argmax())],
        "g1_unscaled": row(masked_softmax(Product(2, scaled=False)(q, q))[-1].tolist(), 6),
        "g1_masked_row": row(weights[2, :3].tolist(), 6),
        "g1_itself": number(float(weights[1, 1]), 6),
        "g1_second": row(mixtures[1].tolist(), 6),
        "g1_mixtures": table(WORDS, [[row(own, 6) for own in mixtures.tolist()]]),
        "g1_same": row(masked_softmax(scores)[-1, :3].tolist(), 6)[:-1] + ", …)",
    }


def _by_word(values: Tensor) -> str:
    return table(WORDS, [[number(value, 6) for value in values.tolist()]])


def _named(values: Tensor) -> str:
    return ", ".join(f"{name} {number(value, 6)}" for name, value in zip(OUTPUTS, values.tolist(), strict=True))


def _leak() -> dict[str, str]:
    """How a mask after the softmax leaks."""
    scores, masked_score = torch.tensor([0.3, 1.0], dtype=torch.float64), 5.0
    with_masked = torch.tensor([float(scores[0]), masked_score], dtype=torch.float64)
    mask = torch.tensor([True, False])
    assert torch.equal(masked_softmax(scores, mask), masked_softmax(with_masked, mask))
    return {
        "leak_scores": short(scores.tolist()),
        "leak_score": f"{masked_score:g}",
        "leak_before": number(float(masked_softmax(scores)[0]), 4),
        "leak_after": number(float(masked_softmax(with_masked)[0]), 4),
        "leak_masked": f"{float(masked_softmax(with_masked, mask)[0]):g}",
    }


# --- the customer ---------------------------------------------------------------------------------------------------


def walk(facts: ShopModel) -> dict[str, str]:
    """One history from tokens to the answer, each step by the model's own parts."""
    model = recommender(facts)
    numbers = model.vocabulary.numbers(HISTORY, unknown="error")
    titles = [title or "" for title in model.vocabulary.titles(numbers)]
    events = torch.arange(1, len(HISTORY) + 1)
    next_title = model.vocabulary.titles(model.vocabulary.numbers([BOUGHT_NEXT], unknown="error"))[0]
    return (
        _inside(model, numbers)
        | _outside(model, titles)
        | {
            "history_credit": f"The log of a British gift shop: {CREDIT}.",
            "walk_history": table(["event", "bought"], zip(map(str, events.tolist()), titles, strict=True)),
            "walk_shape": f"SASRec with {SHAPE.depth} layer, {SHAPE.heads} head and vectors of {SHAPE.width} features",
            "walk_cases": f"{facts.cases:,}",
            "walk_items": str(len(facts.items)),
            "walk_hit": f"{facts.hits['model']:.1%}".replace("%", " %"),
            "walk_rule": f"{facts.hits['last-item']:.1%}".replace("%", " %"),
            "walk_bought": str(next_title),
        }
    )


def _inside(recommender: Recommender, numbers: np.ndarray) -> dict[str, str]:
    """Tokens, queries, keys, scores, weights, mixture and the state that is compared with items."""
    model, count = recommender.model, len(numbers)
    batch = PackedBatch(
        items=torch.from_numpy(numbers), times=torch.zeros(count, dtype=torch.int64), lengths=torch.tensor([count])
    )
    block = model.blocks[0]
    assert isinstance(block, SASRecBlock)
    x = model.positions(model.items.input(batch.items) * model.scale, batch)
    normal = block.norm_query(x)
    q, (k, v) = block.attention.query(normal), block.attention.key_value(x).chunk(2, dim=-1)
    scores = block.attention.score(q[-1:], k)[0]
    weights = masked_softmax(scores)
    mixture = weights @ v
    middle = block.norm_forward(normal[-1] + mixture)
    state = model.norm(middle + block.feed_forward(middle))
    # The steps above are the model's own.
    assert np.abs(recommender.attention(HISTORY)["layer 1"][0, -1] - weights.numpy()).max() < 1e-12
    assert torch.allclose(model.query(batch)[0], state, rtol=0, atol=1e-12)
    powers = scores.exp()
    return {
        "walk_tokens": table(
            ["event", "token x", "key", "value"],
            [[str(event + 1), *(row(part[event].tolist(), 3) for part in (x, k, v))] for event in range(count)],
        ),
        "walk_query": row(q[-1].tolist(), 3),
        "walk_sum": number(float(powers.sum()), 3),
        "walk_scores": table(
            ["event", "score", "e^score", "weight"],
            [
                [str(event + 1), number(score, 3), number(power, 3), number(weight, 4)]
                for event, (score, power, weight) in enumerate(
                    zip(scores.tolist(), powers.tolist(), weights.tolist(), strict=True)
                )
            ],
        ),
        "walk_mixture_sum": " + ".join(
            f"{number(weight, 4)} · {row(value, 3)}" for weight, value in zip(weights.tolist(), v.tolist(), strict=True)
        ),
        "walk_mixture": row(mixture.tolist(), 3),
        "walk_state": row(state.tolist(), 3),
    }


def _outside(recommender: Recommender, titles: list[str]) -> dict[str, str]:
    """The output for a user of the model: answers, attention map, contributions."""
    answers = recommender.recommend(HISTORY, k=3).items
    explanation = recommender.explain(HISTORY)
    lines = list(attention_lines(explanation, View(layer="1", head=1)))
    weights = recommender.attention(HISTORY)["layer 1"][0, -1].tolist()
    contributions = [entry.contribution or 0.0 for entry in explanation.contributions]
    assert answers[0].id == BOUGHT_NEXT and explanation.item.id == BOUGHT_NEXT
    assert weights[1] > 0.2 and contributions[1] < 0 and weights[-1] < 0.01 and contributions[-1] > 0.4, (
        "the moral fails"
    )
    return {
        "walk_map": "\n".join(lines[1:]),
        "walk_answers": table(
            ["answer", "item", "score"],
            [[str(rank), str(answer.title), number(answer.score, 3)] for rank, answer in enumerate(answers, start=1)],
        ),
        "walk_contributions": table(
            ["without event", "", "weight", "the answer's score changes by"],
            [
                [str(event + 1), titles[event], number(weights[event], 4), _signed(-contributions[event])]
                for event in range(len(titles))
            ],
        ),
        "walk_moral": (
            f"The second event has a weight of {number(weights[1], 4)}, and without it the score is *higher*. The "
            f"newest has a weight of {number(weights[-1], 4)}, and without it the score falls by "
            f"{number(contributions[-1], 3)}: its way is the residual."
        ),
    }


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value, 3)


# --- the variants ---------------------------------------------------------------------------------------------------


def variants() -> dict[str, str]:
    """Small numbers for the kinds of score, masks, positions, hard attention and HSTU's weights."""
    query, key = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    bilinear, additive = Bilinear(2, 2).double(), Additive(2, 2, 2, "tanh").double()
    # Its weight maps queries, so it holds U transposed.
    bilinear.query.weight.copy_(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
    additive.query.weight.copy_(torch.eye(2))
    additive.key.weight.copy_(torch.eye(2))
    additive.vector.weight.fill_(1.0)
    scores = {
        "dot": Product(2, scaled=False),
        "scaled": Product(2, scaled=True),
        "bilinear": bilinear,
        "additive": additive,
    }
    return (
        _masks()
        | _positions()
        | {
            "kinds_query": short(query[0].tolist()),
            "kinds_key": short(key[0].tolist()),
            **{f"score_{kind}": number(float(score(query, key)), 4) for kind, score in scores.items()},
            "silu": number(float(functional.silu(torch.tensor(-1.0, dtype=torch.float64)) / 4), 4),
        }
    )


def _masks() -> dict[str, str]:
    padded = torch.tensor([0.4, 0.0, 0.0, 0.0], dtype=torch.float64)
    only = torch.tensor([True, False, False, False])
    logits = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    hard = select_weights(logits, None, "straight-through", temperature=1.0, training=False, generator=None).weights
    return {
        "pad_score": f"{float(padded[0]):g}",
        "pad_leaked": number(float(masked_softmax(padded)[0]), 4),
        "pad_masked": f"{float(masked_softmax(padded, only)[0]):g}",
        "hard_scores": short(logits.tolist()),
        "hard_soft": row(masked_softmax(logits).tolist(), 4),
        "hard_chosen": short(hard.tolist()),
    }


def _positions() -> dict[str, str]:
    rotary = Rotary(16, 4)
    q, k = (torch.tensor(values).view(1, 1, 1, 4) for values in ([1.0, 0.5, -1.0, 0.25], [0.5, 1.0, 0.75, -0.5]))

    def product(query_position: int, key_position: int) -> str:
        products = rotary(q, torch.tensor([query_position])) * rotary(k, torch.tensor([key_position]))
        return number(float(products.sum()), 4)

    distances = torch.tensor([-1, -5, -20, -100])
    buckets = distance_buckets(distances, causal=True, buckets=32, furthest=128).tolist()
    return {
        "sinusoid": row(sinusoids(2, 4)[1].tolist(), 5),
        "rotary_near": product(2, 5),
        "rotary_far": product(12, 15),
        "rotary_other": product(2, 6),
        "buckets": f"{', '.join(map(str, buckets[:-1]))} and {buckets[-1]} of 32",
    }


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(f"Wrote {DOCUMENT}.")
