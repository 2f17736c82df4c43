"""Faults of kernels that work in tiles: right where one tile holds everything, wrong where several are joined."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.tiled import State, Tiles, of, tiled


class SumsKept(Tiles):
    """The sums of earlier tiles stay as they are where a later one has a larger maximum."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        new, total, sums = super().join(state, s, v)
        top = state[0]
        return new, total, torch.where(top == -math.inf, sums, sums + state[2] * (1 - (top - new).exp()))


@fault(
    "TL-sums",
    "The sums of earlier tiles stay as they are where a later one has a larger maximum",
    killed_by=("attention.tiles",),
    cause="wrong factors|tile of 128",
)
def sums() -> Subject:
    return tiled(SumsKept, 128)


class TotalKept(Tiles):
    """The denominator of earlier tiles stays as it is where a later one has a larger maximum."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        new, total, sums = super().join(state, s, v)
        top = state[0]
        return new, torch.where(top == -math.inf, total, total + state[1] * (1 - (top - new).exp())), sums


@fault(
    "TL-total",
    "The denominator of earlier tiles stays as it is where a later one has a larger maximum",
    killed_by=("attention.tiles",),
    cause="the sum of the exponentials is not rescaled",
)
def total() -> Subject:
    return tiled(TotalKept, 64)


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


@fault(
    "TL-remainder",
    "Where there is more than one tile, keys behind the last full one are left out",
    killed_by=("attention.tiles",),
    cause="keys end too early",
)
def remainder() -> Subject:
    return tiled(RemainderDropped, 64)


class ZerosBehind(Tiles):
    """The last tile is filled with keys of zeros, which nothing hides."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        missing = self.block - s.shape[-1]
        if bool((state[0] > -math.inf).any()) and missing > 0:
            s, v = nn.functional.pad(s, (0, missing)), nn.functional.pad(v, (0, 0, 0, missing))
        return super().join(state, s, v)


@fault(
    "TL-zeros",
    "The last tile is filled with keys of zeros, which nothing hides",
    killed_by=("attention.tiles",),
    cause="more keys of score 0 take|one more key of score 0",
)
def zeros() -> Subject:
    return tiled(ZerosBehind, 128)


class CausalInTile(Tiles):
    """The causal mask compares with the place of a key in its tile."""

    def columns(self, columns: range) -> Tensor:
        return torch.arange(len(columns))


@fault(
    "TL-causal-keys",
    "The causal mask compares with the place of a key in its tile",
    killed_by=("attention.tiles",),
    cause="sees keys that are hidden",
)
def causal_keys() -> Subject:
    return tiled(CausalInTile, 64)


class CausalRowsInTile(Tiles):
    """The causal mask compares with the place of a query in its tile."""

    def rows(self, rows: range, shift: int) -> Tensor:
        return torch.arange(len(rows))[:, None] + shift


@fault(
    "TL-causal-queries",
    "The causal mask compares with the place of a query in its tile",
    killed_by=("attention.tiles",),
    cause="tile of 128|keys end too early",
)
def causal_queries() -> Subject:
    return tiled(CausalRowsInTile, 128)


class SkipsTooMuch(Tiles):
    """Tiles are skipped that the first query of a tile does not see, though its last ones do."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        return causal and columns.start > rows.start + shift and columns.start >= self.block


@fault(
    "TL-skips",
    "Tiles are skipped that the first query of a tile does not see, though its last ones do",
    killed_by=("attention.tiles",),
    cause="keys end too early|tile of 128",
)
def skips() -> Subject:
    return tiled(SkipsTooMuch, 128)


class SkipsWithoutShift(Tiles):
    """Which tiles are skipped is found as if there were as many queries as keys."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        return causal and columns.start > max(rows.stop - 1, self.block - 1)


@fault(
    "TL-shift",
    "Which tiles are skipped is found as if there were as many queries as keys",
    killed_by=("attention.tiles",),
    cause="keys end too early|tile of 128",
)
def shift() -> Subject:
    return tiled(SkipsWithoutShift, 128)


class Tails(Tiles):
    """Channels of a head behind the last full 32 are left out of the scores."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        full = q.shape[-1] // 32 * 32 or q.shape[-1]
        return q[..., :full] @ k[..., :full].mT * q.shape[-1] ** -0.5


@fault(
    "TL-tails",
    "Channels of a head behind the last full 32 are left out of the scores",
    killed_by=("attention.tiles",),
    cause="channels of a head",
)
def tails() -> Subject:
    return tiled(Tails, 16)


class GroupsInTurn(Tiles):
    """Heads take the key-value heads in turn where there are more keys than a tile holds."""

    def grown(self, x: Tensor, repeats: int) -> Tensor:
        return x.repeat(1, repeats, 1, 1) if x.shape[2] > self.block else super().grown(x, repeats)


@fault(
    "TL-groups",
    "Heads take the key-value heads in turn where there are more keys than a tile holds",
    killed_by=("attention.tiles",),
    cause="tile of 64",
)
def groups() -> Subject:
    return tiled(GroupsInTurn, 64)


class Averaged(Tiles):
    """Outputs of the tiles are averaged by the number of keys, not by their log-sum-exp."""

    def joined(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        right = super().joined(q, k, v, mask, causal)
        if causal or mask is not None or len(self.tiles(k.shape[2])) == 1:
            return right
        parts = [Tiles.joined(self, q, of(k, c), of(v, c), None, False)[0] * len(c) for c in self.tiles(k.shape[2])]
        return torch.stack(parts).sum(0) / k.shape[2], right[1]


@fault(
    "TL-split",
    "Outputs of the tiles are averaged by the number of keys, not by their log-sum-exp",
    killed_by=("attention.tiles",),
    cause="wrong factors|tile of 128",
)
def split() -> Subject:
    return tiled(Averaged, 128)


class HalfSums(Tiles):
    """The sums are kept in bfloat16 from tile to tile."""

    dtype = torch.bfloat16

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        new, total, sums = super().join(state, s, v)
        return new, total, sums.to(self.dtype).to(sums.dtype) if bool((state[1] > 0).any()) else sums


@fault("TL-half", "The sums are kept in bfloat16 from tile to tile", killed_by=("attention.tiles",), cause="tile of 32")
def half() -> Subject:
    return tiled(HalfSums, 32)


class HalfSums16(HalfSums):
    """The sums are kept in float16 from tile to tile."""

    dtype = torch.float16


@fault(
    "TL-half16",
    "The sums are kept in float16 from tile to tile",
    killed_by=("attention.tiles",),
    cause="right up to 128 keys",
)
def half16() -> Subject:
    return tiled(HalfSums16, 128)


class WindowTile(Tiles):
    """Tiles are skipped that only the last query of a tile does not see any more."""

    def skips(self, rows: range, columns: range, shift: int, causal: bool) -> bool:
        past = self.window is not None and columns.stop - 1 <= rows.stop - 1 + shift - self.window
        return super().skips(rows, columns, shift, causal) or (causal and past)


@fault(
    "TL-window",
    "Tiles are skipped that only the last query of a tile does not see any more",
    killed_by=("attention.tiles",),
    cause="get no weight",
)
def window() -> Subject:
    return tiled(WindowTile, 64, window=40)
