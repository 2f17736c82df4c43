"""Faults in the backward of kernels that work in tiles, whose outputs are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.tiled import Tiles, of, tiled
from veriformer.tests.mutants.tiles import CausalInTile


class LastKeysAlone(Tiles):
    """The gradient of the queries is written by each tile of keys, not added to."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        d_q, d_k, d_v = super().pulled(saved, g)
        columns = self.tiles(saved[1].shape[2])[-1]
        if len(columns) == saved[1].shape[2]:
            return [d_q, d_k, d_v]
        q, k, v, _, size, mask, causal = saved
        p = torch.cat([self.shown(q, k, r, columns, mask, causal) - of(size, r) for r in self.tiles(q.shape[2])], 2)
        mean = (g * saved[3]).sum(-1, keepdim=True)
        d_s = p.exp() * (g @ of(v, columns).mT - mean) * q.shape[-1] ** -0.5
        return [d_s @ of(k, columns), d_k, d_v]


@fault(
    "TL-dq",
    "The gradient of the queries is written by each tile of keys, not added to",
    killed_by=("attention.tiles",),
    cause="tile of 64",
)
def dq() -> Subject:
    return tiled(LastKeysAlone, 64)


class FirstQueriesAlone(Tiles):
    """The gradient of the keys is that of the first tile of queries."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        first = torch.arange(g.shape[2])[:, None] < self.block
        d_q, _, d_v = super().pulled(saved, g)
        return [d_q, super().pulled(saved, g * first)[1], d_v]


@fault(
    "TL-dk",
    "The gradient of the keys is that of the first tile of queries",
    killed_by=("attention.tiles",),
    cause="tile of 64",
)
def dk() -> Subject:
    return tiled(FirstQueriesAlone, 64)


class ValuesOfFullTiles(Tiles):
    """The gradient of the values leaves out queries behind the last full tile."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        full = max(g.shape[2] // self.block * self.block, min(self.block, g.shape[2]))
        d_q, d_k, _ = super().pulled(saved, g)
        return [d_q, d_k, super().pulled(saved, g * (torch.arange(g.shape[2])[:, None] < full))[2]]


@fault(
    "TL-dv",
    "The gradient of the values leaves out queries behind the last full tile",
    killed_by=("attention.tiles",),
    cause="tile of 128",
)
def dv() -> Subject:
    return tiled(ValuesOfFullTiles, 128)


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
                p = (self.shown(q, k, rows, columns, mask, causal) - of(size, rows)).exp()
                d_p = of(g, rows) @ of(v, columns).mT
                d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
                self.add(d_q, rows, d_s @ of(k, columns), columns)
                self.add(d_k, columns, d_s.mT @ of(q, rows), rows)
        return [d_q, d_k, found[2]]


@fault(
    "TL-delta",
    "What is taken off w v^T in the backward is the mean over one tile of keys",
    killed_by=("attention.tiles",),
    cause="tile of 64|delta",
)
def delta() -> Subject:
    return tiled(MeanOfTile, 64)


class BackwardUnmasked(Tiles):
    """The backward makes the weights of later tiles again without the mask."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        if saved[5] is None:
            return super().pulled(saved, g)
        mask = saved[5].clone()
        mask[..., self.block :] |= mask[..., self.block :].any(-1, keepdim=True)
        return super().pulled((*saved[:5], mask, saved[6]), g)


@fault(
    "TL-backward-mask",
    "The backward makes the weights of later tiles again without the mask",
    killed_by=("attention.tiles",),
    cause="right up to 65 keys|forgets the mask",
)
def backward_mask() -> Subject:
    return tiled(BackwardUnmasked, 64)


class BackwardCausalInTile(Tiles):
    """The backward compares with the place of a key in its tile."""

    def pulled(self, saved: tuple[Any, ...], g: Tensor) -> list[Tensor]:
        return CausalInTile(self.block, self.window).pulled(saved, g)


@fault(
    "TL-backward-causal",
    "The backward compares with the place of a key in its tile",
    killed_by=("attention.tiles",),
    cause="right up to 65",
)
def backward_causal() -> Subject:
    return tiled(BackwardCausalInTile, 64)
