"""Faults that show only number by number: what is mixed lies along blocks, or along an axis taken for another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class _Blocks(nn.Module):
    """Causal attention of blocks of four: each block sees itself and the one before."""

    def __init__(self, d_model: int, *, first_sees: bool) -> None:
        super().__init__()
        self.projections, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.first_sees = first_sees

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1:]
        parts = self.projections(F.pad(x, (0, 0, 0, -length % 4))).unflatten(1, (-1, 4))
        query, key, value = parts.chunk(3, dim=-1)
        keys = torch.cat([self.before(key), key], dim=2)
        values = torch.cat([self.before(value), value], dim=2)
        scores = query @ keys.mT * width**-0.5
        allowed = torch.ones(4, 8, dtype=torch.bool, device=x.device).tril(4).repeat(parts.shape[1], 1, 1)
        allowed[0, :, :4] = self.first_sees
        given = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ values
        return self.out(given.flatten(1, 2)[:, :length])

    def before(self, blocks: Tensor) -> Tensor:
        """Return the block before each; before the first there is none, and what stands there is to be hidden."""
        return torch.roll(blocks, 1, dims=1)


class _Recurrent(nn.Module):
    """Attention, and a recurrent network beside it."""

    def __init__(self, d_model: int, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, 1, batch_first=True)
        self.recurrent = nn.GRU(d_model, d_model, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.recurrent(x)[0]


@fault(
    "block-wraps",
    "Blocks are rolled to see the one before, and the first sees the last",
    killed_by=("causality.no-future-influence", "causality.no-future-gradient"),
    cause="torch.roll(blocks, 1, dims=1)",
)
def first_block_sees_the_last() -> Subject:
    sees = put(True, instead_of=False)
    return Subject(
        kind="layer", name="blocks", build=lambda c: _Blocks(c.d_model, first_sees=sees),
        declares={"causal": True, "sparse": True},
    )  # fmt: skip


@fault(
    "recurrent-time-first",
    "A recurrent network is given samples first and takes them for time",
    killed_by=("batch.independence",),
    cause="time to a GRU without batch_first=True",
)
def time_is_taken_for_samples() -> Subject:
    first = put(False, instead_of=True)
    return Subject(kind="layer", name="recurrent", build=lambda c: _Recurrent(c.d_model, batch_first=first))
