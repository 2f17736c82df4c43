"""The right kernel that faults of tiles are made from: flash attention in the open, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.mending import put

State = tuple[Tensor, Tensor, Tensor]


class Tiles(nn.Module):
    """Attention in tiles of queries and keys, forward and backward; to be changed by overriding one method.

    Args:
        block: keys, and queries, of a tile; sums run in float32 at least.
        window: keys that a query sees under causal=True, its own among them; None: all before it.
    """

    def __init__(self, block: int = 64, window: int | None = None) -> None:
        super().__init__()
        self.block = block
        self.window = window

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        self.given = q.dtype
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        k, v = (self.grown(x, q.shape[1] // x.shape[1]) for x in (k, v))
        out: Tensor = _Joined.apply(self, q, k, v, attention_mask, causal)  # type: ignore[no-untyped-call]
        return out.to(self.given)

    def grown(self, x: Tensor, repeats: int) -> Tensor:
        return x.repeat_interleave(repeats, 1)

    def tiles(self, length: int) -> list[range]:
        return [range(i, min(i + self.block, length)) for i in range(0, length, self.block)]

    def rows(self, rows: range, shift: int) -> Tensor:
        return torch.arange(rows.start, rows.stop)[:, None] + shift

    def columns(self, columns: range) -> Tensor:
        return torch.arange(columns.start, columns.stop)

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        return mask[..., rows.start : rows.stop, columns.start : columns.stop]

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        return causal and columns.start > rows.stop - 1 + shift

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def shown(self, q: Tensor, k: Tensor, rows: range, columns: range, mask: Tensor | None, causal: bool) -> Tensor:
        """Return the scores of one tile, -inf where a key is hidden."""
        s = self.scores(of(q, rows), of(k, columns))
        if mask is not None:
            s = s.masked_fill(~self.part(mask, rows, columns, q.shape[1]), -math.inf)
        if causal:
            at, to = self.rows(rows, k.shape[2] - q.shape[2]), self.columns(columns)
            behind = to <= at
            s = s.masked_fill(~(behind if self.window is None else behind & (to > at - self.window)), -math.inf)
        return s

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        """Take one more tile in."""
        top, total, sums = state
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        base = new.masked_fill(new == -math.inf, 0.0)
        p, old = (s - base).exp(), (top - base).exp()
        return new, total * old + p.sum(-1, keepdim=True), sums * old + p @ v

    def joined(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of each row."""
        outputs, sizes, shift = [], [], k.shape[2] - q.shape[2]
        for rows in self.tiles(q.shape[2]):
            first = q[:, :, rows.start : rows.stop, :1]
            state = (torch.full_like(first, -math.inf), torch.zeros_like(first), first * v[:, :, :1] * 0)
            for columns in self.tiles(k.shape[2]):
                if not self.skips(rows, columns, shift, causal):
                    s = self.shown(q, k, rows, columns, mask, causal)
                    state = self.join(state, s, of(v, columns))
            top, total, sums = state
            outputs.append(sums / total.masked_fill(total == 0, 1.0))
            sizes.append((top + total.log()).masked_fill(total == 0, 0.0))
        return torch.cat(outputs, 2), torch.cat(sizes, 2)

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        """Return the gradients of queries, keys and values: each tile's weights are made again."""
        q, k, v, out, size, mask, causal = saved
        d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
        mean, shift = (g * out).sum(-1, keepdim=True), k.shape[2] - q.shape[2]
        for rows in self.tiles(q.shape[2]):
            for columns in self.tiles(k.shape[2]):
                if self.skips(rows, columns, shift, causal):
                    continue
                p = (self.shown(q, k, rows, columns, mask, causal) - of(size, rows)).exp()
                d_s = p * (of(g, rows) @ of(v, columns).mT - of(mean, rows)) * q.shape[-1] ** -0.5
                self.add(d_q, rows, d_s @ of(k, columns), columns)
                self.add(d_k, columns, d_s.mT @ of(q, rows), rows)
                self.add(d_v, columns, p.mT @ of(g, rows), rows)
        return [d_q, d_k, d_v]

    def add(self, whole: Tensor, at: range, part: Tensor, other: range) -> None:
        whole[:, :, at.start : at.stop] += part


def of(x: Tensor, places: range) -> Tensor:
    return x[:, :, places.start : places.stop]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, kernel: Tiles, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        out, size = kernel.joined(q, k, v, mask, causal)
        ctx.save_for_backward(q, k, v, out, size)
        ctx.kernel, ctx.mask, ctx.causal = kernel, mask, causal
        return out

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, *ctx.kernel.pulled((*ctx.saved_tensors, ctx.mask, ctx.causal), g), None, None


FACTS = {
    "empty_row": "zeros", "grouped_queries": True, "causal_alignment": "bottom-right", "once_differentiable": True,
}  # fmt: skip


def tiled(wrong: type[Tiles], block: int, window: int | None = None) -> Subject:
    """Return a kernel of tiles of a size as a subject."""
    made = put(wrong, instead_of=Tiles)
    return Subject(
        kind="attention",
        build=lambda c: made(block, window),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("pairwise",),
        declares=FACTS | ({} if window is None else {"window": window}),
    )
