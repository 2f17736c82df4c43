"""How the sublayers of a model are joined to its stream: where their norms stand, what their outputs are added to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product as combinations

import torch
from torch import Tensor

from veriformer.properties.anatomy.norms import NormCall, held, measured_gain, normalised
from veriformer.properties.anatomy.residual import turned_rows
from veriformer.properties.anatomy.sublayers import biased, streams_before
from veriformer.properties.anatomy.traced import Product
from veriformer.properties.twin.looking import Look
from veriformer.properties.twin.parts import Joined, NormRole, NumberError, PartedError

_NEXT = 40  # values between the last term of a sum and the sum: dropouts, norms, casts
_ONE = 1e-5


def joined(look: Look, product: Product, taken: Tensor, what: str) -> Joined:
    """Return how a sublayer is joined to the stream.

    Args:
        look: the forward.
        product: the sublayer's last map.
        taken: what its first map takes.
        what: the sublayer in words.

    Raises:
        PartedError: in no way of the textbook's.
    """
    total = look.sums.get(product.when)
    if total is None:
        return _with_normed_change(look, product, taken, what)
    if max(abs(total.stream - 1), abs(total.branch - 1)) > _ONE:
        raise NumberError(
            f"behind {what} the stream is taken {total.stream:.6g} times and the sublayer {total.branch:.6g} times"
        )
    summed = look.seen.values[total.when].output
    streams = streams_before(look.seen, product.when, total.when)
    for norm in look.norms:
        if look.same(norm.made, taken) and any(look.same(norm.given, stream) for stream in streams):
            return Joined({"in": role_of(look, norm)}, norm.given, summed)
    for norm in look.norms:
        if look.same(norm.given, summed):
            return Joined({"out": role_of(look, norm)}, taken, norm.made)
    for norm in look.norms:
        if norm.when > total.when and (factor := look.multiple(norm.given, summed)) is not None:
            raise NumberError(f"the stream is multiplied by {factor:.6g} behind {what}")
    raise PartedError(f"no norm stands before {what}, and none behind it")


def _with_normed_change(look: Look, product: Product, taken: Tensor, what: str) -> Joined:
    """Return how a sublayer is joined whose output goes through a norm before it is added."""
    given = biased(look.seen, product.when)
    for change in look.norms:
        if change.when <= product.when or not look.same(change.given, given):
            continue
        for before, stream in (*((n, n.given) for n in _that_made(look, taken, product.when)), (None, taken)):
            if (found := sum_of(look, (stream, change.made), change.when, what)) is not None:
                norms = {"in": role_of(look, before)} if before else {}
                return Joined({**norms, "change": role_of(look, change)}, stream, found)
    for change in look.norms:
        factor = look.multiple(change.given, given) if change.when > product.when else None
        if factor is not None and abs(factor - 1) > _ONE:
            raise NumberError(f"what {what} gives is multiplied by {factor:.6g}")
    raise PartedError(f"what {what} gives is not added to the stream")


def side_by_side(look: Look, sublayers: Sequence[tuple[Product, Tensor, str]]) -> list[Joined] | None:
    """Return how sublayers are joined that take one stream and are added to it together; None where they are not.

    Args:
        look: the forward.
        sublayers: of each the last map, what its first map takes, and itself in words.
    """
    last = max(product.when for product, _, _ in sublayers)
    norms = [next(_that_made(look, taken, product.when), None) for product, taken, _ in sublayers]
    found = [norm for norm in norms if norm is not None]
    if len(found) < len(norms) or not all(look.same(n.given, found[0].given) for n in found):
        return None
    changes = [biased(look.seen, product.when) for product, _, _ in sublayers]
    end = sum_of(look, (found[0].given, *changes), last, " and ".join(what for _, _, what in sublayers))
    return None if end is None else [Joined({"in": role_of(look, n)}, n.given, end) for n in found]


def _that_made(look: Look, taken: Tensor, before: int) -> Iterator[NormCall]:
    """Yield the norms that made what a map takes."""
    return (n for n in look.norms if n.when <= before and look.same(n.made, taken))


def sum_of(look: Look, terms: Sequence[Tensor], since: int, what: str) -> Tensor | None:
    """Return the sum of a stream and what sublayers gave; None where none follows.

    Args:
        look: the forward.
        terms: the stream first.
        since: number of values before which it is not made.
        what: the sublayers in words.

    Raises:
        NumberError: they are added with other factors than 1.
    """
    for value in look.seen.values[since : since + _NEXT]:
        if value.name != "add" or value.output.numel() != terms[0].numel():
            continue
        total = value.output.double()
        for rows in combinations(*(_orders(term, total) for term in terms)):
            columns = torch.stack(rows, 1)
            factors = torch.linalg.lstsq(columns, total.reshape(-1, 1)).solution
            left = float((columns @ factors - total.reshape(-1, 1)).abs().amax())
            if left > look.limit * float(total.abs().amax()) or float(factors.abs().amin()) < 1e-3:
                continue
            if float((factors - 1).abs().amax()) > 1e-2 * look.limit + _ONE:
                told = " times, ".join(f"{float(f):.6g}" for f in factors[1:])
                raise NumberError(
                    f"behind {what} the stream is taken {float(factors[0]):.6g} times and the sublayer {told} times"
                )
            return value.output
    return None


def _orders(term: Tensor, total: Tensor) -> list[Tensor]:
    """Return the numbers of a term, `[N]`, as they are and with samples and positions in the other order."""
    flat = term.cpu().double().reshape(-1)
    return [flat, *turned_rows(flat, total)]


def require_one_stream(look: Look, end: Tensor, stream: Tensor, place: str) -> None:
    """Require that a sublayer takes the stream that the one before it left.

    Raises:
        NumberError: it takes a multiple of it.
        PartedError: it takes something else.
    """
    if look.same(stream, end):
        return
    factor = look.multiple(stream, end)
    if factor is None:
        raise PartedError(f"what enters {place} is not what the sublayer before it left")
    raise NumberError(f"the stream is multiplied by {factor:.6g} before it enters {place}")


def role_of(look: Look, call: NormCall) -> NormRole:
    """Return a norm's gain and bias: its own parameters, or 1 more than the gain that it keeps."""
    if not call.kind:
        raise PartedError(f"{call.place} is neither LayerNorm nor RMSNorm")
    width = call.given.shape[-1]
    gain, (own, _) = measured_gain(call), held(call)
    plain = normalised(call.given, call.kind, call.eps).reshape(-1, width)
    bias = (call.made.reshape(-1, width) - gain * plain).mean(0)
    if not any(float((gain - k).abs().amax()) <= 1e2 * look.limit * float(k.abs().amax()) for k in (own, 1 + own)):
        told = f"the gain of {call.place} is not the parameter that it keeps"
        share = gain / own
        unbiased = (width / (width - 1)) ** 0.5  # another formula: the variance divided by d - 1
        is_formula = any(float((share - s).abs().amax()) <= 1e-4 for s in (unbiased, 1 / unbiased))
        has_its_own = any(p.shape == (width,) for p in call.part.parameters()) and not is_formula
        raise NumberError(told) if has_its_own else PartedError(told)
    return NormRole(call.kind, gain, bias, call.eps, call.when)
