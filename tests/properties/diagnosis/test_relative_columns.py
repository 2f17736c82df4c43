"""Scores by distance from wrong columns are named, and right ways of shifting them are not spoken of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.properties.diagnosis.test_parts import cause
from veriformer.properties.subject.subject import Subject

Shift = Callable[[Tensor], Tensor]


def shifted(x: Tensor, pad: tuple[int, int], start: int = 1) -> Tensor:
    batch, heads, length, columns = x.shape
    x = F.pad(x, pad).view(batch, heads, columns + 1, length)[:, :, start : start + columns]
    return x.reshape(batch, heads, length, columns)[..., :length]


def unfolded(x: Tensor) -> Tensor:
    """Pad on the right, as tensor2tensor does, whose way of cutting rows needs that."""
    length = x.shape[2]
    x = F.pad(F.pad(x, (0, 1)).flatten(2), (0, length - 1))
    return x.unflatten(2, (length + 1, 2 * length - 1))[:, :, :length, length - 1 :]


def gathered(x: Tensor) -> Tensor:
    length = x.shape[2]
    places = torch.arange(length)
    rows = length - 1 - places[:, None] + places
    return x.gather(-1, rows.expand(*x.shape[:2], -1, -1))


class Encoder(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, num_heads: int, shift: Shift, columns: int) -> None:
        super().__init__()
        self.num_heads, self.shift, self.columns = num_heads, shift, columns
        self.embed, self.norm = nn.Embedding(vocab_size, d_model), nn.LayerNorm(d_model)
        self.query, self.key, self.value, self.place = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        length, width = x.shape[1:]
        first = torch.arange(length - 1, length - 1 - (length if self.columns == 1 else 2 * length - 1), -1)
        table = torch.sin(first[:, None] * 0.37 * torch.arange(1, width + 1) + torch.arange(width)).to(x.dtype)
        query, key, value = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        place = self.place(table).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)
        scores = (query @ key.mT + self.shift(query @ place)) / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.norm(x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("shift", "columns", "said"),
    [
        (lambda x: shifted(x, (1, 0)), 2, "PASS"),
        (unfolded, 2, "PASS"),
        (gathered, 2, "PASS"),
        (lambda x: shifted(x, (0, 1)), 2, "one column too far to the right: with 5 positions they have 9 columns"),
        (lambda x: shifted(x, (0, 1)), 2, "pads them on the right, where its way of cutting rows needs the left"),
        (lambda x: shifted(x, (1, 0), 0), 2, "that of query 1 on key 0 is read from the row of query 0"),
        (lambda x: shifted(x, (1, 0)), 1, "keys behind the query are those of another query"),
    ],
)
def test_which_columns_relative_scores_are_read_from_is_said(shift: Shift, columns: int, said: str) -> None:
    subject = Subject(
        kind="encoder",
        build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, shift, columns),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "relative", "max_len": 24},
    )
    assert said in cause(subject, "padding.amount-irrelevant")
