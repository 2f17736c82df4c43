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


class _Sorted(nn.Module):
    """Two feed-forward networks, of which each token takes one: tokens are sorted by which."""

    def __init__(self, d_model: int, d_ff: int, *, along: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)) for _ in range(2)
        )
        self.along = along

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = self.gate(tokens).softmax(-1)
        chosen = scores.argmax(-1)
        order = chosen.argsort(stable=True)
        parts = tokens[order].split([int((chosen == e).sum()) for e in range(2)])
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        gates = scores.gather(1, chosen[:, None])
        return (made * (gates[order] if self.along else gates))[order.argsort()].view_as(x)


@fault(
    "gates-not-sorted",
    "Tokens are sorted by expert, and the gates that they are multiplied by are not sorted along",
    killed_by=("ffn.position-wise",),
    cause="they are sorted at",
)
def gates_are_not_sorted_along() -> Subject:
    along = put(False, instead_of=True)
    return Subject(kind="feed_forward", name="sorted", build=lambda c: _Sorted(c.d_model, c.d_ff, along=along))


class _Remembering(nn.Module):
    """Attention over the sequence and three learned tokens in front of it, which are cut off again."""

    def __init__(self, d_model: int, *, behind: bool) -> None:
        super().__init__()
        self.learned, self.behind = nn.Parameter(torch.randn(1, 3, d_model)), behind
        self.attention = nn.MultiheadAttention(d_model, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat([self.learned.expand(len(x), -1, -1), x], dim=1)
        later = torch.ones(2 * (whole.shape[1],), dtype=torch.bool, device=x.device).triu(1)
        given = whole + self.attention(whole, whole, whole, attn_mask=later, need_weights=False)[0]
        return given[:, 3:] if self.behind else given[:, : x.shape[1]]


@fault(
    "front-not-cut-off",
    "Of learned tokens and the sequence behind them the first T are kept, not the last",
    killed_by=("causality.first-token", "causality.no-future-gradient"),
    cause="outputs stand 3 places late",
)
def the_end_is_cut_off() -> Subject:
    behind = put(False, instead_of=True)
    return Subject(
        kind="layer", name="learned tokens", build=lambda c: _Remembering(c.d_model, behind=behind),
        declares={"causal": True},
    )  # fmt: skip


class _Shortened(nn.Module):
    """Means of three positions, moved right by so many that no output sees ahead, added to each of the three."""

    def __init__(self, d_model: int, moved: int) -> None:
        super().__init__()
        self.mixing, self.moved = nn.Linear(d_model, d_model), moved

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        parts = F.pad(x, (0, 0, self.moved, -length % 3 + 3))[:, : length + -length % 3].unflatten(1, (-1, 3)).mean(2)
        return x + self.mixing(parts).repeat_interleave(3, 1)[:, :length]


@fault(
    "shortened-too-early",
    "A sequence is moved right by one before three positions are made into one, where two are needed",
    killed_by=("causality.no-future-influence",),
    cause="parts of 3 positions are made into one",
)
def shortened_too_early() -> Subject:
    moved = put(1, instead_of=2)
    return Subject(
        kind="layer", name="shortened", build=lambda c: _Shortened(c.d_model, moved),
        declares={"causal": True, "sparse": True},
    )  # fmt: skip
