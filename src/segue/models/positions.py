"""The choice of positions: added to tokens (`build`), or to the attention scores of two tokens (`relative`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from segue.errors import SettingsError
from segue.kinds import Count, Kind
from segue.layers.attention.multi_head import Relative
from segue.layers.positions.embeddings import LearnedPositions, NoPositions, Positions, SinusoidalPositions
from segue.layers.positions.relative import RelativeBuckets, Rotary


class _PositionSettings(Kind, frozen=True):
    """The methods of every kind of positions."""

    def build(self, length: int, width: int) -> Positions:  # noqa: ARG002
        """The positions that are added to `length` tokens of `width` features; by default none."""
        return NoPositions(length)

    def relative(self, heads: int, length: int, width: int) -> Relative | None:  # noqa: ARG002
        """The relative positions of an attention layer; by default none."""
        return None


class NewestPositionSettings(_PositionSettings, frozen=True, tag="newest"):
    """A learned vector for each position, counted from the newest event."""

    def build(self, length: int, width: int) -> Positions:
        return LearnedPositions(length, width, "newest")


class OldestPositionSettings(_PositionSettings, frozen=True, tag="oldest"):
    """A learned vector for each position, counted from the oldest event: a prefix is encoded as it is inside the whole
    history, so that new events can use a KV cache."""

    def build(self, length: int, width: int) -> Positions:
        return LearnedPositions(length, width, "oldest")


class SinusoidalPositionSettings(_PositionSettings, frozen=True, tag="sinusoidal"):
    """Sines and cosines of the position, counted from the oldest event."""

    def build(self, length: int, width: int) -> Positions:
        return SinusoidalPositions(length, width)


class RotaryPositionSettings(_PositionSettings, frozen=True, tag="rotary"):
    """Queries and keys are rotated by their position."""

    def relative(self, heads: int, length: int, width: int) -> Relative | None:
        return Rotary(length, width // heads)


class BucketPositionSettings(_PositionSettings, frozen=True, tag="buckets"):
    """A learned number for each head and each bucket of distances, added to scores."""

    count: Annotated[int, Meta(ge=2)] = 32
    """Buckets. Short distances have one each, longer ones share wider and wider ones."""
    furthest: Count = 128
    """Distances from this one on share the last bucket."""

    def __post_init__(self) -> None:
        if self.furthest <= self.count // 2:
            raise SettingsError(
                "model.positions.furthest must be above half of model.positions.count, whose distances have a bucket "
                f"each, got {self.furthest} and {self.count}."
            )

    def relative(self, heads: int, length: int, width: int) -> Relative | None:  # noqa: ARG002
        return RelativeBuckets(heads, length, causal=True, buckets=self.count, furthest=self.furthest)


LearnedPositionSettings = NewestPositionSettings | OldestPositionSettings
AnyPositionSettings = (
    NewestPositionSettings
    | OldestPositionSettings
    | SinusoidalPositionSettings
    | RotaryPositionSettings
    | BucketPositionSettings
)
