"""The maps that make the heads of an attention: straight, or through a norm of queries and keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention
from veriformer.properties.anatomy.feed_forward import Source
from veriformer.properties.anatomy.norms import NormCall
from veriformer.properties.anatomy.sources import Head, source_of
from veriformer.properties.twin.joining import role_of
from veriformer.properties.twin.looking import Look
from veriformer.properties.twin.parts import Map, NumberError, PartedError, Side


def sides(look: Look, seen: Attention) -> tuple[Attention, Side, Side]:
    """Return an attention, of which it is now known where normalised heads come from, its queries and its keys."""
    query_from, query = _side(look, seen, seen.query, seen.query_from, "queries")
    key_from, key = _side(look, seen, seen.key, seen.key_from, "keys")
    return replace(seen, query_from=query_from, key_from=key_from), query, key


def _side(
    look: Look, seen: Attention, rows: Tensor, sources: list[Head | None], what: str
) -> tuple[list[Head | None], Side]:
    told = f"the {what} of {seen.place or 'the model'}"
    if all(sources):
        return sources, Side(*map_of_heads(look, sources, told), None)
    for norm in look.norms:
        if norm.when > seen.when or norm.given.shape[-1] != rows.shape[-1]:
            continue
        for made, given in zip(_by_head(look, norm.made, rows), _by_head(look, norm.given, rows), strict=True):
            known = [_of_norm(look, norm, rows[:, head], made) for head in range(rows.shape[1])]
            if not all(known):
                continue
            groups = sorted({head.start for head in known if head is not None})
            inner = [source_of(look.seen, given[:, group], norm.when) for group in groups]
            for head, group in zip(inner, groups, strict=True):
                if head is None or look.same(head.source, given[:, group]):
                    continue
                if (factor := look.multiple(given[:, group], head.source)) is not None:
                    raise NumberError(f"{told} are multiplied by {factor:.6g} before they are normalised")
                raise PartedError(f"{told} are turned before they are normalised")
            return known, Side(*map_of_heads(look, inner, told), role_of(look, norm))
    raise PartedError(f"{told} do not come from a linear map alone")


def _by_head(look: Look, x: Tensor, rows: Tensor) -> list[Tensor]:
    """Return the readings `[B, G, T, K]` of what a norm of heads takes or gives, heads before positions or behind."""
    length = rows.shape[2]
    if x.ndim != 4 or len(x) != look.batch:
        return []
    return [y for axis in (1, 2) if x.shape[axis] == length for y in (x.transpose(1, 2) if axis == 1 else x,)]


def _of_norm(look: Look, norm: NormCall, rows: Tensor, made: Tensor) -> Head | None:
    """Return the head of what a norm gave, `[B, G, T, K]`, that rows `[B, T, K]` are, turned and scaled or not."""
    sizes = rows.norm(dim=-1)
    for group in range(made.shape[1]):
        own = made[:, group].norm(dim=-1)
        factor = float((own * sizes).sum() / own.square().sum().clamp(min=1e-300))
        if factor and float((factor * own - sizes).abs().amax()) <= look.limit * float(sizes.amax()):
            return Head(made[:, group], factor, norm.when, norm.place, group, 1)
    return None


def once(heads: list[Head | None]) -> list[Head | None]:
    """Return the sources of heads, each once."""
    found: list[Head | None] = []
    for head in heads:
        if head is None or not any(h is not None and (h.when, h.start) == (head.when, head.start) for h in found):
            found.append(head)
    return found


def map_of_heads(look: Look, heads: list[Head | None], what: str) -> tuple[Map, Tensor]:
    """Return the map of all heads, each once, and what it takes.

    Raises:
        PartedError: they come from no linear map.
    """
    weights, biases, taken = [], [], []
    for head in once(heads):
        if head is None:
            raise PartedError(f"{what} do not come from a linear map alone")
        product, own = look.source(Source(head.when, head.channels), what)
        weights.append(own.weight)
        biases.append(own.bias if own.bias is not None else torch.zeros(len(own.weight), dtype=torch.float64))
        taken.append(product.left)
    bias = torch.cat(biases)
    return Map(torch.cat(weights), bias if bool(bias.any()) else None), taken[0]
