"""Faults of kernels that work in tiles under a mask: tiles that it empties, and masks read at another tile's place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.tiled import State, Tiles, tiled


class EmptyTileNan(Tiles):
    """A tile that the mask empties before any key was seen gives -inf - -inf."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        top, total, sums = state
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p, old = (s - new).exp(), (top - new).exp().nan_to_num(0.0)
        if bool((new > -math.inf).any()) and not bool((new > -math.inf).all()):
            return new, total * old + p.sum(-1, keepdim=True), sums * old + p @ v
        return super().join(state, s, v)


@fault(
    "TL-empty-nan",
    "A tile that the mask empties before any key was seen gives -inf - -inf",
    killed_by=("attention.tiles",),
    cause="a tile is empty",
)
def empty_nan() -> Subject:
    return tiled(EmptyTileNan, 64)


class EmptyTileUniform(Tiles):
    """All keys of a tile that the mask empties weigh alike: their scores are set to the lowest that was seen."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        empty = (s == -math.inf).all(-1, keepdim=True) & (state[0] > -math.inf)
        return super().join(state, torch.where(empty, state[0] - 3, s), v)


@fault(
    "TL-empty-uniform",
    "All keys of a tile that the mask empties weigh alike: their scores are set to the lowest that was seen",
    killed_by=("attention.tiles",),
    cause="instead of -inf|right up to 128 keys",
)
def empty_uniform() -> Subject:
    return tiled(EmptyTileUniform, 128)


class MaskOfFirstTile(Tiles):
    """The mask is read with the place of a key in its tile."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        return mask[..., rows.start : rows.stop, : len(columns)]


@fault(
    "TL-mask-keys",
    "The mask is read with the place of a key in its tile",
    killed_by=("attention.tiles",),
    cause="sees keys that are hidden|right up to 64 keys",
)
def mask_keys() -> Subject:
    return tiled(MaskOfFirstTile, 64)


class MaskRowsOfFirstTile(Tiles):
    """The mask is read with the place of a query in its tile."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        return mask[..., : len(rows), columns.start : columns.stop]


@fault(
    "TL-mask-queries",
    "The mask is read with the place of a query in its tile",
    killed_by=("attention.tiles",),
    cause="right up to 32 queries",
)
def mask_queries() -> Subject:
    return tiled(MaskRowsOfFirstTile, 32)


class MaskOfFirstSample(Tiles):
    """From the second tile on the mask is that of the first sample."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        own = super().part(mask, rows, columns, heads)
        return own[:1].expand_as(own) if columns.start else own


@fault(
    "TL-mask-sample",
    "From the second tile on the mask is that of the first sample",
    killed_by=("attention.tiles",),
    cause="right up to 64 keys",
)
def mask_sample() -> Subject:
    return tiled(MaskOfFirstSample, 64)


class MaskOfOtherHead(Tiles):
    """From the second tile on sample b and head h take the mask of sample (b H + h) mod B."""

    def part(self, mask: Tensor, rows: range, columns: range, heads: int) -> Tensor:
        own = super().part(mask, rows, columns, heads)
        flat = torch.arange(len(own) * heads).unflatten(0, (-1, heads)) % len(own)
        return own[flat, 0] if columns.start else own


@fault(
    "TL-mask-head",
    "From the second tile on sample b and head h take the mask of sample (b H + h) mod B",
    killed_by=("attention.tiles",),
    cause="right up to 32 keys",
)
def mask_head() -> Subject:
    return tiled(MaskOfOtherHead, 32)
