"""Faults of kernels that work in tiles: right where one tile holds everything, wrong where several are joined."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

State = tuple[Tensor, Tensor, Tensor]


class Tiles(nn.Module):
    """Attention in tiles of queries and keys, forward and backward; to be changed by overriding one method.

    Args:
        block: keys, and queries, of a tile.
        window: keys that a query sees under causal=True, its own among them; None: all before it.
    """

    def __init__(self, block: int = 64, window: int | None = None) -> None:
        super().__init__()
        self.block = block
        self.window = window

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        k, v = (self.grown(x, q.shape[1] // x.shape[1]) for x in (k, v))
        return _Joined.apply(self, q, k, v, attention_mask, causal)  # type: ignore[no-any-return, no-untyped-call]

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
        s = self.scores(_of(q, rows), _of(k, columns))
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
                    state = self.join(state, s, _of(v, columns))
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
                p = (self.shown(q, k, rows, columns, mask, causal) - _of(size, rows)).exp()
                d_s = p * (_of(g, rows) @ _of(v, columns).mT - _of(mean, rows)) * q.shape[-1] ** -0.5
                self.add(d_q, rows, d_s @ _of(k, columns), columns)
                self.add(d_k, columns, d_s.mT @ _of(q, rows), rows)
                self.add(d_v, columns, p.mT @ _of(g, rows), rows)
        return [d_q, d_k, d_v]

    def add(self, whole: Tensor, at: range, part: Tensor, other: range) -> None:
        whole[:, :, at.start : at.stop] += part


def _of(x: Tensor, places: range) -> Tensor:
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


class SumsKept(Tiles):
    """The sums of earlier tiles stay as they are where a later one has a larger maximum."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        new, total, sums = super().join(state, s, v)
        top = state[0]
        return new, total, torch.where(top == -math.inf, sums, sums + state[2] * (1 - (top - new).exp()))


class TotalKept(Tiles):
    """The denominator of earlier tiles stays as it is where a later one has a larger maximum."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        new, total, sums = super().join(state, s, v)
        top = state[0]
        return new, torch.where(top == -math.inf, total, total + state[1] * (1 - (top - new).exp())), sums


class TopOfTile(Tiles):
    """Weights are taken from the tile's own maximum, and the larger of the two is kept for the next one."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        top, total, sums = state
        own = s.amax(-1, keepdim=True).clamp(min=-1e30)
        new = torch.maximum(top, own)
        p, old = (s - own).exp(), (top - new).exp()
        return new, total * old + p.sum(-1, keepdim=True), sums * old + p @ v


class RemainderDropped(Tiles):
    """Where there is more than one tile, keys behind the last full one are left out."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        left_out = columns.start > 0 and len(columns) < self.block
        return left_out or super().skips(rows, columns, shift, causal)


class ZerosBehind(Tiles):
    """The last tile is filled with keys of zeros, which nothing hides."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        missing = self.block - s.shape[-1]
        if bool((state[0] > -math.inf).any()) and missing > 0:
            s, v = nn.functional.pad(s, (0, missing)), nn.functional.pad(v, (0, 0, 0, missing))
        return super().join(state, s, v)


class CausalInTile(Tiles):
    """The causal mask compares with the place of a key in its tile."""

    def columns(self, columns: range) -> Tensor:
        return torch.arange(len(columns))


class CausalRowsInTile(Tiles):
    """The causal mask compares with the place of a query in its tile."""

    def rows(self, rows: range, shift: int) -> Tensor:
        return torch.arange(len(rows))[:, None] + shift


class SkipsTooMuch(Tiles):
    """Tiles are skipped that the first query of a tile does not see, though its last ones do."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        return causal and columns.start > rows.start + shift and columns.start >= self.block


class SkipsWithoutShift(Tiles):
    """Which tiles are skipped is found as if there were as many queries as keys."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        return causal and columns.start > max(rows.stop - 1, self.block - 1)


class EmptyTileNan(Tiles):
    """A tile that the mask empties before any key was seen gives -inf - -inf."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        top, total, sums = state
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p, old = (s - new).exp(), (top - new).exp().nan_to_num(0.0)
        if bool((new > -math.inf).any()) and not bool((new > -math.inf).all()):
            return new, total * old + p.sum(-1, keepdim=True), sums * old + p @ v
        return super().join(state, s, v)


class EmptyTileUniform(Tiles):
    """All keys of a tile that the mask empties weigh alike: their scores are set to the lowest that was seen."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        empty = (s == -math.inf).all(-1, keepdim=True) & (state[0] > -math.inf)
        return super().join(state, torch.where(empty, state[0] - 3, s), v)


class MaskOfFirstTile(Tiles):
    """The mask is read with the place of a key in its tile."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        return mask[..., rows.start : rows.stop, : len(columns)]


class MaskRowsOfFirstTile(Tiles):
    """The mask is read with the place of a query in its tile."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        return mask[..., : len(rows), columns.start : columns.stop]


class MaskOfFirstSample(Tiles):
    """From the second tile on the mask is that of the first sample."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        own = super().part(mask, rows, columns, heads)
        return own[:1].expand_as(own) if columns.start else own


class MaskOfOtherHead(Tiles):
    """From the second tile on sample b and head h take the mask of sample (b H + h) mod B."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        own = super().part(mask, rows, columns, heads)
        flat = torch.arange(len(own) * heads).unflatten(0, (-1, heads)) % len(own)
        return own[flat, 0] if columns.start else own


class Tails(Tiles):
    """Channels of a head behind the last full 32 are left out of the scores."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        full = q.shape[-1] // 32 * 32 or q.shape[-1]
        return q[..., :full] @ k[..., :full].mT * q.shape[-1] ** -0.5


class GroupsInTurn(Tiles):
    """Heads take the key-value heads in turn where there are more keys than a tile holds."""

    def grown(self, x: Tensor, repeats: int) -> Tensor:
        return x.repeat(1, repeats, 1, 1) if x.shape[2] > self.block else super().grown(x, repeats)


class Averaged(Tiles):
    """Outputs of the tiles are averaged by the number of keys, not by their log-sum-exp."""

    def joined(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        right = super().joined(q, k, v, mask, causal)
        if causal or mask is not None or len(self.tiles(k.shape[2])) == 1:
            return right
        parts = [Tiles.joined(self, q, _of(k, c), _of(v, c), None, False)[0] * len(c) for c in self.tiles(k.shape[2])]
        return torch.stack(parts).sum(0) / k.shape[2], right[1]


class HalfSums(Tiles):
    """The sums are kept in bfloat16 from tile to tile."""

    dtype = torch.bfloat16

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        new, total, sums = super().join(state, s, v)
        return new, total, sums.to(self.dtype).to(sums.dtype) if bool((state[1] > 0).any()) else sums


class HalfSums16(HalfSums):
    """The sums are kept in float16 from tile to tile."""

    dtype = torch.float16


class WindowTile(Tiles):
    """Tiles are skipped that only the last query of a tile does not see any more."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        past = self.window is not None and columns.stop - 1 <= rows.stop - 1 + shift - self.window
        return super().skips(rows, columns, shift, causal) or (causal and past)


class LastKeysAlone(Tiles):
    """The gradient of the queries is written by each tile of keys, not added to."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        d_q, d_k, d_v = super().pulled(saved, g)
        columns = self.tiles(saved[1].shape[2])[-1]
        if len(columns) == saved[1].shape[2]:
            return [d_q, d_k, d_v]
        q, k, v, _, size, mask, causal = saved
        p = torch.cat([self.shown(q, k, r, columns, mask, causal) - _of(size, r) for r in self.tiles(q.shape[2])], 2)
        mean = (g * saved[3]).sum(-1, keepdim=True)
        d_s = p.exp() * (g @ _of(v, columns).mT - mean) * q.shape[-1] ** -0.5
        return [d_s @ _of(k, columns), d_k, d_v]


class FirstQueriesAlone(Tiles):
    """The gradient of the keys is that of the first tile of queries."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        first = torch.arange(g.shape[2])[:, None] < self.block
        d_q, _, d_v = super().pulled(saved, g)
        return [d_q, super().pulled(saved, g * first)[1], d_v]


class ValuesOfFullTiles(Tiles):
    """The gradient of the values leaves out queries behind the last full tile."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        full = max(g.shape[2] // self.block * self.block, min(self.block, g.shape[2]))
        d_q, d_k, _ = super().pulled(saved, g)
        return [d_q, d_k, super().pulled(saved, g * (torch.arange(g.shape[2])[:, None] < full))[2]]


class MeanOfTile(Tiles):
    """What is taken off w v^T in the backward is the mean over one tile of keys."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        q, k, v, _, size, mask, causal = saved
        found = super().pulled(saved, g)
        if len(self.tiles(k.shape[2])) == 1:
            return found
        d_q, d_k = torch.zeros_like(q), torch.zeros_like(k)
        for rows in self.tiles(q.shape[2]):
            for columns in self.tiles(k.shape[2]):
                p = (self.shown(q, k, rows, columns, mask, causal) - _of(size, rows)).exp()
                d_p = _of(g, rows) @ _of(v, columns).mT
                d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
                self.add(d_q, rows, d_s @ _of(k, columns), columns)
                self.add(d_k, columns, d_s.mT @ _of(q, rows), rows)
        return [d_q, d_k, found[2]]


class BackwardUnmasked(Tiles):
    """The backward makes the weights of later tiles again without the mask."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        if saved[5] is None:
            return super().pulled(saved, g)
        mask = saved[5].clone()
        mask[..., self.block :] |= mask[..., self.block :].any(-1, keepdim=True)
        return super().pulled((*saved[:5], mask, saved[6]), g)


class BackwardCausalInTile(Tiles):
    """The backward compares with the place of a key in its tile."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        return CausalInTile(self.block, self.window).pulled(saved, g)


WRONG = (
    SumsKept, TotalKept, TopOfTile, RemainderDropped, ZerosBehind, CausalInTile, CausalRowsInTile, SkipsTooMuch,
    SkipsWithoutShift, EmptyTileNan, EmptyTileUniform, MaskOfFirstTile, MaskRowsOfFirstTile, MaskOfFirstSample,
    MaskOfOtherHead, Tails, GroupsInTurn, Averaged, HalfSums, HalfSums16, WindowTile, LastKeysAlone,
    FirstQueriesAlone, ValuesOfFullTiles, MeanOfTile, BackwardUnmasked, BackwardCausalInTile,
)  # fmt: skip


@fault(
    "TL-sums",
    "The sums of earlier tiles stay as they are where a later one has a larger maximum",
    killed_by=("attention.tiles",),
    cause="wrong factors|tile of 128",
)
def sums() -> Subject:
    return tiled(SumsKept, 128)


@fault(
    "TL-total",
    "The denominator of earlier tiles stays as it is where a later one has a larger maximum",
    killed_by=("attention.tiles",),
    cause="denominator",
)
def total() -> Subject:
    return tiled(TotalKept, 64)


@fault(
    "TL-remainder",
    "Where there is more than one tile, keys behind the last full one are left out",
    killed_by=("attention.tiles",),
    cause="keys end too early",
)
def remainder() -> Subject:
    return tiled(RemainderDropped, 64)


@fault(
    "TL-zeros",
    "The last tile is filled with keys of zeros, which nothing hides",
    killed_by=("attention.tiles",),
    cause="padding of a block",
)
def zeros() -> Subject:
    return tiled(ZerosBehind, 128)


@fault(
    "TL-causal-keys",
    "The causal mask compares with the place of a key in its tile",
    killed_by=("attention.tiles",),
    cause="sees keys that are hidden",
)
def causal_keys() -> Subject:
    return tiled(CausalInTile, 64)


@fault(
    "TL-causal-queries",
    "The causal mask compares with the place of a query in its tile",
    killed_by=("attention.tiles",),
    cause="tile of 128|keys end too early",
)
def causal_queries() -> Subject:
    return tiled(CausalRowsInTile, 128)


@fault(
    "TL-skips",
    "Tiles are skipped that the first query of a tile does not see, though its last ones do",
    killed_by=("attention.tiles",),
    cause="keys end too early|tile of 128",
)
def skips() -> Subject:
    return tiled(SkipsTooMuch, 128)


@fault(
    "TL-shift",
    "Which tiles are skipped is found as if there were as many queries as keys",
    killed_by=("attention.tiles",),
    cause="keys end too early|tile of 128",
)
def shift() -> Subject:
    return tiled(SkipsWithoutShift, 128)


@fault(
    "TL-empty-nan",
    "A tile that the mask empties before any key was seen gives -inf - -inf",
    killed_by=("attention.tiles",),
    cause="a tile is empty",
)
def empty_nan() -> Subject:
    return tiled(EmptyTileNan, 64)


@fault(
    "TL-empty-uniform",
    "All keys of a tile that the mask empties weigh alike: their scores are set to the lowest that was seen",
    killed_by=("attention.tiles",),
    cause="instead of -inf|right up to 128 keys",
)
def empty_uniform() -> Subject:
    return tiled(EmptyTileUniform, 128)


@fault(
    "TL-mask-keys",
    "The mask is read with the place of a key in its tile",
    killed_by=("attention.tiles",),
    cause="sees keys that are hidden|right up to 64 keys",
)
def mask_keys() -> Subject:
    return tiled(MaskOfFirstTile, 64)


@fault(
    "TL-mask-queries",
    "The mask is read with the place of a query in its tile",
    killed_by=("attention.tiles",),
    cause="right up to 32 queries",
)
def mask_queries() -> Subject:
    return tiled(MaskRowsOfFirstTile, 32)


@fault(
    "TL-mask-sample",
    "From the second tile on the mask is that of the first sample",
    killed_by=("attention.tiles",),
    cause="right up to 64 keys",
)
def mask_sample() -> Subject:
    return tiled(MaskOfFirstSample, 64)


@fault(
    "TL-mask-head",
    "From the second tile on sample b and head h take the mask of sample (b H + h) mod B",
    killed_by=("attention.tiles",),
    cause="right up to 32 keys",
)
def mask_head() -> Subject:
    return tiled(MaskOfOtherHead, 32)


@fault(
    "TL-tails",
    "Channels of a head behind the last full 32 are left out of the scores",
    killed_by=("attention.tiles",),
    cause="channels of a head",
)
def tails() -> Subject:
    return tiled(Tails, 16)


@fault(
    "TL-groups",
    "Heads take the key-value heads in turn where there are more keys than a tile holds",
    killed_by=("attention.tiles",),
    cause="tile of 64",
)
def groups() -> Subject:
    return tiled(GroupsInTurn, 64)


@fault(
    "TL-split",
    "Outputs of the tiles are averaged by the number of keys, not by their log-sum-exp",
    killed_by=("attention.tiles",),
    cause="wrong factors|tile of 128",
)
def split() -> Subject:
    return tiled(Averaged, 128)


@fault("TL-half", "The sums are kept in bfloat16 from tile to tile", killed_by=("attention.tiles",), cause="tile of 32")
def half() -> Subject:
    return tiled(HalfSums, 32)


@fault(
    "TL-half16",
    "The sums are kept in float16 from tile to tile",
    killed_by=("attention.tiles",),
    cause="right up to 128 keys",
)
def half16() -> Subject:
    return tiled(HalfSums16, 128)


@fault(
    "TL-window",
    "Tiles are skipped that only the last query of a tile does not see any more",
    killed_by=("attention.tiles",),
    cause="get no weight",
)
def window() -> Subject:
    return tiled(WindowTile, 64, window=40)


@fault(
    "TL-dq",
    "The gradient of the queries is written by each tile of keys, not added to",
    killed_by=("attention.tiles",),
    cause="tile of 64",
)
def dq() -> Subject:
    return tiled(LastKeysAlone, 64)


@fault(
    "TL-dk",
    "The gradient of the keys is that of the first tile of queries",
    killed_by=("attention.tiles",),
    cause="tile of 64",
)
def dk() -> Subject:
    return tiled(FirstQueriesAlone, 64)


@fault(
    "TL-dv",
    "The gradient of the values leaves out queries behind the last full tile",
    killed_by=("attention.tiles",),
    cause="tile of 128",
)
def dv() -> Subject:
    return tiled(ValuesOfFullTiles, 128)


@fault(
    "TL-delta",
    "What is taken off w v^T in the backward is the mean over one tile of keys",
    killed_by=("attention.tiles",),
    cause="tile of 64|delta",
)
def delta() -> Subject:
    return tiled(MeanOfTile, 64)


@fault(
    "TL-backward-mask",
    "The backward makes the weights of later tiles again without the mask",
    killed_by=("attention.tiles",),
    cause="right up to 65 keys|forgets the mask",
)
def backward_mask() -> Subject:
    return tiled(BackwardUnmasked, 64)


@fault(
    "TL-backward-causal",
    "The backward compares with the place of a key in its tile",
    killed_by=("attention.tiles",),
    cause="right up to 65",
)
def backward_causal() -> Subject:
    return tiled(BackwardCausalInTile, 64)
