"""Faults of the backward alone, beyond one tile: windows, causal masks, skipped blocks, groups, rows, labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.tiled import Tiles, tiled
from veriformer.tests.mutants.tiles import SkipsTooMuch, WindowTile

Saved = tuple[Any, ...]


def some(right: list[Tensor], wrong: list[Tensor], *which: int) -> list[Tensor]:
    """Return the gradients of queries, keys and values, of which some are wrong."""
    return [wrong[n] if n in which else right[n] for n in range(3)]


class NoWindowForQueries(Tiles):
    """The gradient of the queries is taken without the window."""

    def pulled(self, saved: Saved, g: Tensor) -> list[Tensor]:
        return some(super().pulled(saved, g), Tiles(self.block).pulled(saved, g), 0)


@fault(
    "BA-window-dq",
    "The gradient of the queries is taken without the window",
    killed_by=("attention.tiles",),
    cause="right up to 90 queries and keys",
)
def window_dq() -> Subject:
    return tiled(NoWindowForQueries, 64, window=90)


class WiderWindowForKeys(Tiles):
    """The window of the keys' gradient is one key wider than that of the output."""

    def pulled(self, saved: Saved, g: Tensor) -> list[Tensor]:
        assert self.window is not None
        return some(super().pulled(saved, g), Tiles(self.block, self.window + 1).pulled(saved, g), 1)


@fault(
    "BA-window-dk",
    "The window of the keys' gradient is one key wider than that of the output",
    killed_by=("attention.tiles",),
    cause="tile of 64|right up to 64",
)
def window_dk() -> Subject:
    return tiled(WiderWindowForKeys, 32, window=64)


class SkipsWindowForValues(Tiles):
    """The gradient of the values leaves out tiles that only the last query of a tile does not see any more."""

    def pulled(self, saved: Saved, g: Tensor) -> list[Tensor]:
        return some(super().pulled(saved, g), WindowTile(self.block, self.window).pulled(saved, g), 2)


@fault(
    "BA-window-dv",
    "The gradient of the values leaves out tiles that only the last query of a tile does not see any more",
    killed_by=("attention.tiles",),
    cause="queries and keys, wrong from",
)
def window_dv() -> Subject:
    return tiled(SkipsWindowForValues, 64, window=50)


class SkipsTooMuchForKeys(Tiles):
    """The gradient of the keys leaves out the tile on the diagonal, from the second one on."""

    def pulled(self, saved: Saved, g: Tensor) -> list[Tensor]:
        return some(super().pulled(saved, g), SkipsTooMuch(self.block, self.window).pulled(saved, g), 1)


@fault(
    "BA-skip-dk",
    "The gradient of the keys leaves out tiles that the first query of a tile does not see, though its last ones do",
    killed_by=("attention.tiles",),
    cause="tile of 128",
)
def skip_dk() -> Subject:
    return tiled(SkipsTooMuchForKeys, 128)


class NoShiftForQueries(Tiles):
    """The gradient of the queries has the causal mask of as many queries as keys where there are more than a tile."""

    def pulled(self, saved: Saved, g: Tensor) -> list[Tensor]:
        right, longer = super().pulled(saved, g), saved[1].shape[2] - saved[0].shape[2]
        if not saved[6] or longer <= 0 or saved[1].shape[2] <= self.block:
            return right
        top_left = TopLeft(self.block)
        return some(right, top_left.pulled(saved, g), 0)


class TopLeft(Tiles):
    """A query sees the keys up to its own number."""

    def rows(self, rows: range, shift: int) -> Tensor:
        return super().rows(rows, 0)

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        return super().skips(rows, columns, 0, causal)


@fault(
    "BA-shift-dq",
    "With fewer queries than keys the gradient of the queries is masked as if there were as many",
    killed_by=("attention.tiles",),
)
def shift_dq() -> Subject:
    return tiled(NoShiftForQueries, 32)


class _Grown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, repeats: int, block: int) -> Tensor:  # type: ignore[override]
        ctx.repeats, ctx.block = repeats, block
        return x.repeat_interleave(repeats, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        right = g.unflatten(1, (-1, ctx.repeats)).sum(2)
        if g.shape[2] <= ctx.block:
            return right, None, None
        return g.unflatten(1, (ctx.repeats, -1)).sum(1), None, None


class GroupsSummedInTurn(Tiles):
    """The gradients of keys and values of a group are those of heads in turn, where there are more keys than a tile."""

    def grown(self, x: Tensor, repeats: int) -> Tensor:
        return _Grown.apply(x, repeats, self.block) if repeats > 1 else x  # type: ignore[no-any-return, no-untyped-call]


@fault(
    "BA-groups",
    "The gradients of keys and values of a group are those of heads in turn, where there are more keys than a tile",
    killed_by=("attention.tiles",),
    cause="tile of 128",
)
def groups() -> Subject:
    return tiled(GroupsSummedInTurn, 128)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        weights = x.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        taken = (w * g).sum(-1, keepdim=True).flatten()
        taken = taken[torch.arange(len(taken), device=g.device) % 1024]  # a program a row, of 1024 at most
        return w * (g - taken.view(*g.shape[:-1], 1))  # type: ignore[no-any-return]


@fault(
    "BA-rows",
    "From row 1024 on the backward of a softmax takes the sums of the first rows again",
    killed_by=("softmax.long-rows",),
    cause="right up to 1024 rows",
)
def rows() -> Subject:
    function = put(lambda x: _Softmax.apply(x), instead_of=lambda x: x.softmax(-1))  # type: ignore[no-untyped-call]
    return Subject(kind="softmax", forward=lambda m, scores, dim=-1: function(scores.movedim(dim, -1)).movedim(-1, dim))


Pulled = Callable[[Tensor, Tensor], Tensor]


class _Fused(torch.autograd.Function):
    """Cross-entropy whose gradient is made in the forward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, pulled: Pulled) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(pulled(x, y))
        return F.cross_entropy(x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return slope * g, None, None


def slope(x: Tensor, y: Tensor) -> Tensor:
    real = (y != -100)[:, None]
    hit = torch.zeros_like(x).scatter_(-1, y.clamp(min=0)[:, None], 1.0)
    return (x.softmax(-1) - hit) * real / real.sum().clamp(min=1)


def fused(pulled: Pulled) -> Subject:
    pulled = put(pulled, instead_of=slope)
    return Subject(
        kind="loss",
        forward=lambda m, x, y: _Fused.apply(x.flatten(0, 1), y.flatten(), pulled),  # type: ignore[no-untyped-call]
        declares={"shifts_labels": False, "once_differentiable": True},
    )


@fault(
    "BA-loss-block",
    "The gradient of a fused loss takes 1 off at the label in the first block of 2048 ids alone",
    killed_by=("loss.definition",),
    cause="wrong from 2049 on",
)
def loss_block() -> Subject:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        found = slope(x, y)
        beyond = (y >= 2048) & (y != -100)
        hit = torch.zeros_like(x).scatter_(-1, y.clamp(min=0)[:, None], 1.0) * beyond[:, None]
        return found + hit / (y != -100).sum().clamp(min=1)

    return fused(wrong)


@fault(
    "BA-loss-tail",
    "The gradient of a fused loss is left at zero for the ids behind the last full block of 1024",
    killed_by=("loss.definition",),
    cause="a last block of 1024 that is not full",
)
def loss_tail() -> Subject:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        full = x.shape[-1] // 1024 * 1024 or x.shape[-1]
        return slope(x, y) * (torch.arange(x.shape[-1], device=x.device) < full)

    return fused(wrong)


@fault(
    "BA-loss-rows",
    "From token 1024 on the gradient of a fused loss is not divided by the number of tokens",
    killed_by=("loss.definition",),
    cause="right up to 1024 tokens",
)
def loss_rows() -> Subject:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        late = torch.arange(len(x), device=x.device)[:, None] >= 1024
        return slope(x, y) * torch.where(late, (y != -100).sum().to(x.dtype), 1.0)

    return fused(wrong)
