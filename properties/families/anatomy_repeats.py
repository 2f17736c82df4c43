"""What is done once too often inside a model: biases, positions, norms; part of `anatomy.residual`, `anatomy.norm`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.norms import norm_calls
from veriformer.properties.anatomy.residual import residual_sums
from veriformer.properties.anatomy.sources import same_tokens
from veriformer.properties.anatomy.sublayers import biased
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case

_WHOLE = 1e-3
"""How far a multiple may be from a whole number: those of float32 are fitted to 1e-4."""


def nothing_is_added_once_more(case: Case, flowing: Flow) -> None:
    """Require that every bias is added once, and that positions do not enter again between the layers."""
    own = list(flowing.built.module.parameters()) if isinstance(flowing.built.module, nn.Module) else []
    biases = repeated_biases(flowing.seen, own)
    count = case.apply(biases_added_again, flowing.seen, own)
    place, times = biases[0] if biases else ("", 1)
    case.require(
        count == 0,
        f"the bias behind {place or 'a linear map'} is added {times} times",
        got=f"W x + {times} b",
        expected="W x + b",
        cause=lambda: f"the bias of {place or 'a linear map'} is added {times} times",
        asks=("structure", "other"),
    )
    places = positions_again(flowing.seen, flowing.width)
    count = case.apply(positions_added_again, flowing.seen, flowing.width)
    case.require(
        count == 0,
        f"what depends on the position alone is added to the stream behind {(places or [''])[0] or 'a sublayer'} again",
        got=f"added again in {len(places)} places",
        expected="positions that enter once, before the first layer",
        cause=lambda: f"positions are added to the stream once more behind {places[0] or 'a sublayer'}",
        asks=("structure", "other"),
    )


def biases_added_again(seen: Traced, own: Sequence[Tensor]) -> Tensor:
    """Return how many linear maps add a multiple of a bias."""
    return torch.tensor(len(repeated_biases(seen, own)))


def repeated_biases(seen: Traced, own: Sequence[Tensor]) -> list[tuple[str, int]]:
    """Return the linear maps behind which a bias is added several times: their paths, and how often."""
    found = []
    for product in seen.products:
        if product.right.shape[:-2].numel() > 1:
            continue
        width = product.right.shape[-1]
        plain = (product.left.double().cpu() @ product.right.double().cpu()).reshape(-1, width)
        made = biased(seen, product.when).double().cpu().reshape(-1, width)
        if made.shape != plain.shape or len(made) < 2:
            continue
        rest, size = made - plain, seen.limit * float(made.abs().amax())
        if float((rest - rest[:1]).abs().amax()) > size or float(rest[0].abs().amax()) <= 1e3 * size:
            continue  # something else is added, or nothing
        vectors = [p.detach().double().cpu() for p in own if tuple(p.shape) == (width,)]
        if any(float((rest[0] - v).abs().amax()) <= size for v in vectors):
            continue
        for v in vectors:
            times = float(rest[0] @ v / (v @ v).clamp(min=1e-300))
            if round(times) >= 2 and abs(times - round(times)) < _WHOLE and _is_multiple(rest[0], times * v, size):
                found.append((product.place, round(times)))
                break
    return found


def _is_multiple(one: Tensor, other: Tensor, size: float) -> bool:
    return float((one - other).abs().amax()) <= size


def positions_added_again(seen: Traced, width: int) -> Tensor:
    """Return in how many places positions enter the stream behind a layer's sum."""
    return torch.tensor(len(positions_again(seen, width)))


def positions_again(seen: Traced, width: int) -> list[str]:
    """Return the sublayers behind whose sum, or its norm, is added what no token makes, position by position."""
    sums, found = sorted(residual_sums(seen, width), key=lambda s: s.when), []
    for one, following in pairwise(sums):
        total = seen.values[one.when].output
        streams = [total, *(n.made for n in norm_calls(seen) if same_tokens(n.given, total, seen.batch, seen.limit))]
        later = [v for v in seen.values[one.when + 1 : following.product] if v.name == "add"]
        if any(_is_of_positions(v.output, x, seen) for v in later for x in streams):
            found.append(one.place)
    return found


def _is_of_positions(made: Tensor, stream: Tensor, seen: Traced) -> bool:
    if made.numel() != stream.numel() or made.ndim < 3:
        return False
    rest = made.double().cpu() - stream.double().cpu().reshape(made.shape)
    size = seen.limit * float(made.abs().amax())
    for axis in (0, 1):
        if rest.shape[axis] == seen.batch and float((rest - rest.narrow(axis, 0, 1)).abs().amax()) <= size:
            over = rest.select(axis, 0)
            return bool((over - over[:1]).abs().amax() > 1e3 * size)
    return False


def no_norm_takes_what_one_gave(case: Case, flowing: Flow) -> None:
    """Require that the layers do not normalise what another norm gave them as it is.

    Where the norms are declared to stand elsewhere, one may close a layer whose next begins with one, as Conformer's.
    """
    if case.subject.fact("norm_placement") == "other":
        return
    places = norms_of_norms(flowing.seen, flowing.width)
    count = case.apply(norms_on_norms, flowing.seen, flowing.width)
    place, before = places[0] if places else ("", "")
    case.require(
        count == 0,
        f"{place} normalises what {before} has normalised already",
        got=f"a norm of a norm in {len(places)} places",
        expected="one norm before what takes it",
        cause=lambda: f"{place} stands behind {before}, and nothing between them",
        asks=("structure", "other"),
    )


def norms_on_norms(seen: Traced, width: int) -> Tensor:
    """Return how many norms inside layers take what another one gave."""
    return torch.tensor(len(norms_of_norms(seen, width)))


def norms_of_norms(seen: Traced, width: int) -> list[tuple[str, str]]:
    """Return the norms of several layers that take what another norm gave, each with the path of that.

    A norm that closes a stack whose layers end in one, or the first layer's behind a norm of the embedding, is met in
    released models, and changes little; one in every layer is none of these.
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    for place, before in _directly_behind(seen, width):
        alike.setdefault(re.sub(r"\d+", "*", place), []).append((place, before))
    return [pair for group in alike.values() if len({place for place, _ in group}) > 1 for pair in group]


def _directly_behind(seen: Traced, width: int) -> Iterator[tuple[str, str]]:
    calls = [n for n in norm_calls(seen) if n.kind and n.given.shape[-1] == width]
    for number, norm in enumerate(calls):
        for other in calls[:number]:
            if other.part is not norm.part and same_tokens(other.made, norm.given, seen.batch, seen.limit):
                yield norm.place, other.place
                break
