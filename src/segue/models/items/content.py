"""An item table computed from content of the catalogue: items unseen in training have vectors too."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.data.vocabulary import PADDING, Vocabulary
from segue.errors import InputError, SettingsError
from segue.kinds import CountOrZero, Rate, kind_of
from segue.layers.dropout import STEPS, byte_mask
from segue.models.items.tables import NO_FACTS, DataFacts, ItemTable, ItemTableSettings, lengthened
from segue.models.text.encoder import TextEncoder
from segue.models.text.hashed import HashedTextSettings
from segue.models.text.sentences import SentenceTextSettings

TextEncoderSettings = HashedTextSettings | SentenceTextSettings


class ContentTable(ItemTable):
    """Vectors that a small network computes from content. With `ids`, a learned vector for each item is added: zero at
    initialisation, so that an item unseen in training has its content alone, and left out for a share `id_dropout` of
    the items in each training step."""

    content: Tensor
    centre: Tensor
    spread: Tensor
    generator: torch.Generator | None = None

    def __init__(
        self,
        facts: DataFacts,
        width: int,
        *,
        hidden: int,
        ids: bool = False,
        id_dropout: float = 0.0,
        mask: bool = False,
    ) -> None:
        """`hidden`: hidden width of the network; 0: it is linear."""
        assert facts.content is not None
        super().__init__(len(facts.content) - 1, width, mask=mask)
        self.hidden, self.ids, self.id_dropout = hidden, ids, id_dropout
        if ids:
            self.into = nn.Parameter(torch.zeros(self.n_items + 1, width))
        self.register_buffer("content", torch.from_numpy(facts.content))
        for name, statistic in zip(("centre", "spread"), _centre_and_spread(facts.content), strict=True):
            self.register_buffer(name, torch.from_numpy(statistic.astype(np.float32)))
        features = facts.content.shape[1]
        self.first = nn.Linear(features, hidden) if hidden else None
        self.last = nn.Linear(hidden or features, width)
        self.texts: TextEncoder | None = facts.texts
        self._id_mask: Tensor | None = None

    @property
    def learned(self) -> list[nn.Parameter]:
        return [self.into] if self.ids else []

    def begin(self, generator: torch.Generator) -> None:
        """Initialise the weights, whatever the initialisation of the rest of the model is."""
        with torch.no_grad():
            for linear in (self.first, self.last):
                if linear is not None:
                    nn.init.xavier_normal_(linear.weight, generator=generator)
                    nn.init.zeros_(linear.bias)
            # Vectors are then about as long as learned ones at initialisation: features are of size one.
            spread = math.sqrt(2 / (self.n_items + 1 + self.width))
            nn.init.normal_(self.last.weight, std=spread * self.last.in_features**-0.5, generator=generator)
            for table in self.learned:
                nn.init.zeros_(table)

    def output(self, numbers: Tensor | None = None) -> Tensor:
        return self._vectors(torch.arange(self.n_items + 1, device=self.content.device) if numbers is None else numbers)

    def answerable(self, counts: np.ndarray) -> np.ndarray:
        """Items that were trained on or have content."""
        answerable: np.ndarray = (counts > 0) | self.content.any(dim=1).cpu().numpy()
        return answerable

    def extended(self, facts: DataFacts) -> ContentTable:
        assert facts.content is not None
        new_content = torch.from_numpy(facts.content[1:]).to(self.content)
        learned: dict[str, nn.Parameter] = {}
        if self.ids:
            rows = torch.cat((self.into.detach(), self.into.new_zeros(len(new_content), self.width)))
            learned = {"into": nn.Parameter(rows, requires_grad=self.into.requires_grad)}
        return lengthened(self, {"content": torch.cat((self.content, new_content))}, learned)

    def _read(self, numbers: Tensor) -> Tensor:
        if self.training and self.ids and self.id_dropout:
            # Sampled once per step, so that input and output drop the same ids.
            dropped = min(round(self.id_dropout * STEPS), STEPS - 1)
            self._id_mask = byte_mask(torch.Size((self.n_items + 1, 1)), dropped, self.content.device, self.generator)
        return self._vectors(numbers)

    def _vectors(self, numbers: Tensor) -> Tensor:
        if not self.training:
            return self._computed(numbers)
        # Each item once: a batch repeats items, and the network would compute them each time.
        index = torch.zeros(self.n_items + 1, dtype=torch.int64, device=numbers.device)
        index[numbers] = 1
        distinct = index.nonzero()[:, 0]
        index[distinct] = torch.arange(len(distinct), device=numbers.device)
        return functional.embedding(index[numbers], self._computed(distinct))

    def _computed(self, numbers: Tensor) -> Tensor:
        content = self.content[numbers]
        has_content = (content != 0).any(dim=-1, keepdim=True)  # other items get average features
        features = (content - self.centre) / self.spread * has_content
        if self.first is not None:
            features = functional.gelu(self.first(features))
        vectors: Tensor = self.last(features) * (numbers != PADDING).unsqueeze(-1)
        if not self.ids:
            return vectors
        ids = functional.embedding(numbers, self.into, padding_idx=PADDING, sparse=self.sparse_gradients)
        if self.training and self._id_mask is not None:
            ids = ids * self._id_mask[numbers]
        return vectors + ids


def _centre_and_spread(content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature [F] over items with content; a constant feature has deviation 1."""
    rows = content[content.any(axis=1)].astype(np.float64)
    if not len(rows):
        return np.zeros(content.shape[1]), np.ones(content.shape[1])
    centre, spread = rows.mean(axis=0), rows.std(axis=0)
    spread[spread <= 1e-7 * np.abs(centre)] = 1  # zero but for rounding
    return centre, spread


class VectorSettings(ItemTableSettings, frozen=True, tag="vectors"):
    """A small network computes an item's vector from its content in the catalogue. An item unseen in training has one
    too."""

    vectors: str = ""
    """A column of the catalogue that holds vectors."""
    texts: tuple[str, ...] = ()
    """Columns of the catalogue whose texts become a vector, beside `vectors` if both are given."""
    text_encoder: TextEncoderSettings = HashedTextSettings()
    """How texts become a vector."""
    hidden: CountOrZero = 128
    """Hidden width of the network that reads content; 0: it is linear."""

    def __post_init__(self) -> None:
        if not self.vectors and not self.texts:
            raise SettingsError(
                f"model.items = {kind_of(self)!r} needs content: name a column of vectors with model.items.vectors, or "
                'columns of texts, as in model.items.texts = ["title"].'
            )
        if not self.texts and self.text_encoder != HashedTextSettings():
            raise SettingsError(
                "model.items.text_encoder encodes the columns that model.items.texts names, and it names none: name "
                'some, as in model.items.texts = ["title"], or leave model.items.text_encoder out.'
            )

    def refuse_silent_catalogue(self, vocabulary: Vocabulary) -> None:
        content = bool(self.vectors) and bool(vocabulary.vectors(self.vectors).any())
        content |= bool(self.texts) and any(vocabulary.texts(self.texts))
        if not content:
            columns = ", ".join(name for name in (*self.texts, self.vectors) if name)
            raise InputError(
                f"The catalogue has no content for any item in {columns}: add the columns that model.items.texts or "
                "model.items.vectors name with `segue prepare --items`."
            )
        refusal = self.text_encoder.encoder.refusal() if self.texts else None
        if refusal is not None:
            encoder = kind_of(self.text_encoder)
            raise SettingsError(f"model.items.text_encoder = {encoder!r}: {refusal}, or choose 'hashed'.")

    def facts(self, vocabulary: Vocabulary, known: DataFacts = NO_FACTS) -> DataFacts:
        texts = known.texts
        if self.texts and texts is None:
            texts = self.text_encoder.encoder.fitted(vocabulary.texts(self.texts), self.text_encoder.width)
        return replace(known, content=self.content(vocabulary, texts), texts=texts)

    def content(self, vocabulary: Vocabulary, texts: TextEncoder | None) -> np.ndarray:
        """The content features of each item [V + 1, F]; zero for padding and for items without content."""
        parts = [vocabulary.vectors(self.vectors)] if self.vectors else []
        if texts is not None:
            vectors = texts.encode(vocabulary.texts(self.texts))
            parts.append(np.concatenate((np.zeros((1, texts.width), dtype=np.float32), vectors)))
        return np.concatenate(parts, axis=1)

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        assert facts.content is not None and len(facts.content) == n_items + 1
        return ContentTable(facts, width, hidden=self.hidden, mask=mask)


class IdVectorSettings(VectorSettings, frozen=True, tag="ids+vectors"):
    """The sum of a learned vector for the item id and one computed from its content."""

    id_dropout: Rate = 0.1
    """Share of the items whose id vector is left out in a training step, so that content alone is trained as well."""

    def table(self, facts: DataFacts, n_items: int, width: int, *, mask: bool, bias: bool) -> ItemTable:  # noqa: ARG002
        assert facts.content is not None and len(facts.content) == n_items + 1
        return ContentTable(facts, width, hidden=self.hidden, ids=True, id_dropout=self.id_dropout, mask=mask)
