"""Causal convolutional blocks over packed tokens [T, D]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from segue.layers.blocks.block import WithoutAttention
from segue.layers.dropout import Dropout
from segue.layers.packed import PackedBatch


def earlier(x: Tensor, batch: PackedBatch, by: int) -> Tensor:
    """The token `by` positions before each token [T, D]; zeros if its user has none there."""
    if by == 0:
        return x
    return x.roll(by, 0) * (batch.position >= by)[:, None]  # also zeros for rows rolled in from the end


def windows(x: Tensor, batch: PackedBatch, count: int, step: int = 1) -> Tensor:
    """Each token and those before it, `step` positions apart, `count` in all, oldest first [T, count * D]."""
    return torch.cat([earlier(x, batch, by * step) for by in reversed(range(count))], dim=1)


class CausalConvolution(nn.Module):
    """A causal convolution with `dilation`, as one product over packed tokens."""

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.dilation = dilation
        self.weights = nn.Linear(kernel * width, width)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        result: Tensor = self.weights(windows(x, batch, self.kernel, self.dilation))
        return result


class DilatedBlock(WithoutAttention):
    """NextItNet's residual block: two causal convolutions with layer norm and ReLU, the second twice as dilated."""

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


class CaserBlock(WithoutAttention):
    """Caser's convolutions at every token, over the image of its user's last `events` tokens, one per row.

    A horizontal filter spans one to all rows; its output is its maximum over the image. Its value at a token does not
    depend on the image, so it is computed once, and then the maximum is taken in each image. A vertical filter is a
    weighted sum of rows, for each feature. Rows before a user's first event are zeros, and a horizontal filter over
    such rows only is left out.
    """

    def __init__(self, width: int, events: int, horizontal: int, vertical: int, dropout: float) -> None:
        """`horizontal`: number of filters of each height. `vertical`: number of vertical filters."""
        super().__init__()
        self.events = events
        self.horizontal = nn.ModuleList(nn.Linear(height * width, horizontal) for height in range(1, events + 1))
        self.vertical = nn.Linear(events, vertical)
        self.joined = nn.Linear(events * horizontal + vertical * width, width)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, batch: PackedBatch) -> Tensor:
        images = windows(x, batch, self.events)  # [T, L * D]
        rows = images.view(x.shape[0], self.events, -1)  # [T, L, D]
        vertical = self.vertical(rows.transpose(1, 2)).flatten(1)  # [T, D * vertical]
        features = torch.cat((self.highest(images, batch), vertical), dim=1)
        return functional.relu(self.joined(self.drop(features)))

    def highest(self, images: Tensor, batch: PackedBatch) -> Tensor:
        """The maximum of each horizontal filter in the image, by rising height [T, L * horizontal]. A filter of height
        h ends at one of the last L - h + 1 events. Outputs are at least 0, so zeros do not change the maximum."""
        width = images.shape[1] // self.events
        outputs = [
            functional.relu(filters(images[:, (self.events - height) * width :]))
            for height, filters in enumerate(self.horizontal, start=1)
        ]
        n_filters = outputs[0].shape[1]
        joined = torch.cat(outputs, dim=1)
        shifted = [
            functional.pad(earlier(joined[:, : (self.events - by) * n_filters], batch, by), (0, by * n_filters))
            for by in range(self.events)
        ]
        return torch.stack(shifted).amax(0)
