"""Convolutional blocks over packed tokens [T, D]: a token sees itself and its user's tokens shortly before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.blocks.transformer import WithoutAttention
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch


def earlier(x: Tensor, batch: PackedBatch, by: int) -> Tensor:
    """At each token what stands so many places before it [T, D]; zeros where its user has nothing there."""
    if by == 0:
        return x
    return x.roll(by, 0) * (batch.position >= by)[:, None]  # what comes round from the end is among what is zero


def windows(x: Tensor, batch: PackedBatch, count: int, step: int = 1) -> Tensor:
    """Each token and, `step` places apart, those before it, `count` together and the oldest first [T, count * D]."""
    return torch.cat([earlier(x, batch, by * step) for by in reversed(range(count))], dim=1)


class CausalConvolution(nn.Module):
    """A filter over each token and those before it, `dilation` places apart: one product over packed tokens."""

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.dilation = dilation
        self.weights = nn.Linear(kernel * width, width)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        result: Tensor = self.weights(windows(x, batch, self.kernel, self.dilation))
        return result


class DilatedBlock(WithoutAttention):
    """The residual block of NextItNet: two causal convolutions, the second twice as dilated, each with a layer norm and
    a ReLU."""

    def __init__(self, width: int, kernel: int, dilation: int, dropout: float) -> None:
        super().__init__()
        self.near = CausalConvolution(width, kernel, dilation)
        self.norm_near = nn.LayerNorm(width, eps=1e-8)
        self.far = CausalConvolution(width, kernel, 2 * dilation)
        self.norm_far = nn.LayerNorm(width, eps=1e-8)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        middle = functional.relu(self.norm_near(self.near(x, batch)))
        result: Tensor = x + self.drop(functional.relu(self.norm_far(self.far(middle, batch))))
        return result

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self.forward(x, batch)[batch.last]


class CaserBlock(WithoutAttention):
    """Caser's convolutions at every token, over the image that its user's last `events` tokens make.

    A horizontal filter spans one to all of the image's rows: its answer is the largest at any height. Where it stands
    at an event does not depend on the image, so each is computed once and the largest taken over the images. A
    vertical filter weighs the rows, each feature by itself. Before a user's first event the image is empty: zeros,
    and a filter that would meet nothing else has no answer.
    """

    def __init__(self, width: int, events: int, horizontal: int, vertical: int, dropout: float) -> None:
        """So many horizontal filters of each height, and so many vertical ones."""
        super().__init__()
        self.events = events
        self.horizontal = nn.ModuleList(nn.Linear(height * width, horizontal) for height in range(1, events + 1))
        self.vertical = nn.Linear(events, vertical)
        self.joined = nn.Linear(events * horizontal + vertical * width, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        images = windows(x, batch, self.events)  # [T, L * D]
        rows = images.view(x.shape[0], self.events, -1)  # [T, L, D]
        weighed = self.vertical(rows.transpose(1, 2)).flatten(1)  # [T, D * vertical]
        features = torch.cat((self.highest(images, batch), weighed), dim=1)
        return functional.relu(self.joined(self.drop(features)))

    def newest(self, x: Tensor, batch: PackedBatch) -> Tensor:
        return self.forward(x, batch)[batch.last]

    def highest(self, images: Tensor, batch: PackedBatch) -> Tensor:
        """Of each horizontal filter its largest answer in the image, lowest filters first [T, L * horizontal].

        A filter of height h has its place at the last L - h + 1 events. Answers are never negative, so that an empty
        place, zero, is never the largest.
        """
        width = images.shape[1] // self.events
        answers = [
            functional.relu(filters(images[:, (self.events - height) * width :]))
            for height, filters in enumerate(self.horizontal, start=1)
        ]
        each = answers[0].shape[1]
        together = torch.cat(answers, dim=1)
        places = [
            functional.pad(earlier(together[:, : (self.events - by) * each], batch, by), (0, by * each))
            for by in range(self.events)
        ]
        return torch.stack(places).amax(0)
