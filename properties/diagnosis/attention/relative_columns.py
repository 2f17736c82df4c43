"""Scores by distance that are read from wrong columns: a shift that pads the wrong side, or wraps rows.

Scores of queries by distance are one product, `[..., T, R]`, of which each pair of a query and a key takes one number.
Which one it takes shows in the gradient of its score. In the row of query t key s takes column `a - t + s`, or its
mirror `a + t - s`, whatever the table holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.causes.tracing.lines import apart
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.engine.violations import Violation

_LENGTH = 5
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
_PADS = ("pad", "cat", "concat", "concatenate")
_HIDDEN = -1e4  # scores below are those of hidden keys, float16's lowest number among them


@dataclass(frozen=True)
class _Read:
    """What pairs of a query and a key take of a product.

    Attributes:
        columns: R of the product.
        places: row and column that a visible pair takes; None where it takes no number.
        padded: "right" or "left", where one column was put beside the product; "" where that was not seen.
    """

    columns: int
    places: Mapping[tuple[int, int], tuple[int, int] | None]
    padded: str


class _Watch(TorchFunctionMode):
    """Keeps products until the first scores of as many keys as queries, and these.

    Attributes:
        products: with at least three axes, in order.
        padded: by number of the product, on which side a column of zeros was put.
        scores: `[..., T, T]`, or with axes elsewhere; None before they are seen.
        axis: of the keys in them.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.products: list[Tensor] = []
        self.padded: dict[int, str] = {}
        self.scores: Tensor | None = None
        self.axis = -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.scores is None and name in ("softmax", "scaled_dot_product_attention"):
            self._note(name, args, given)
        result = func(*args, **given)
        if self.scores is None and isinstance(result, Tensor) and result.ndim >= 3:
            if name in _PRODUCTS and result.requires_grad:
                self.products.append(result)
            elif name in _PADS:
                for number, product in enumerate(self.products):
                    if side := _side(product.detach(), result.detach()):
                        self.padded[number] = side
        return result

    def _note(self, name: str, args: Any, given: Mapping[str, Any]) -> None:
        if name == "softmax":
            scores = args[0] if args else given.get("input")
            dim = given.get("dim", args[1] if len(args) > 1 else -1)
        else:
            scores, dim = given.get("attn_mask", args[3] if len(args) > 3 else None), -1
        if not isinstance(scores, Tensor) or scores.ndim < 2 or not isinstance(dim, int) or not scores.requires_grad:
            return
        if scores.shape[dim] == self.length and list(scores.shape).count(self.length) == 2:
            self.scores, self.axis = scores, dim % scores.ndim


def _side(product: Tensor, wide: Tensor) -> str:
    """Return on which side of a product one more column of zeros stands in another tensor; "" where none does."""
    if wide.ndim != product.ndim:
        return ""
    more = [axis for axis in range(wide.ndim) if wide.shape[axis] != product.shape[axis]]
    if len(more) != 1 or wide.shape[more[0]] != product.shape[more[0]] + 1:
        return ""
    axis, many = more[0], product.shape[more[0]]
    for side, start, at in (("right", 0, many), ("left", 1, 0)):
        if torch.equal(wide.narrow(axis, start, many), product) and not bool(wide.select(axis, at).any()):
            return side
    return ""


def relative_opinion(case: Case, problem: Violation) -> str | None:
    """Say which pairs of a query and a key take no number of the scores by distance, or one of another query."""
    del problem
    built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
    stream = Stream(case, built)
    length = apart(_LENGTH, built.config)
    short, long = (_read(stream, size) for size in (length, length + 2))
    if short is None or long is None or short.columns == long.columns:
        return None  # of a table that does not grow with the sequence far distances may have nothing by design
    return _outside(short, long, length) or _wrapped(short, long)


def _read(stream: Stream, length: int) -> _Read | None:
    """Return what the pairs of the first attention take of the one product that is scores by distance."""
    x = stream.draw(1, length)
    with torch.enable_grad(), _Watch(length) as seen:
        stream(x)
    if seen.scores is None or not seen.products:
        return None
    rows = next(a for a in range(seen.scores.ndim) if a != seen.axis and seen.scores.shape[a] == length)
    scores = seen.scores.movedim((rows, seen.axis), (-2, -1))
    one = scores[(-1,) * (scores.ndim - 2)]  # of one sample and head
    causal = bool(stream.case.subject.fact("causal"))  # what is behind may be hidden when the softmax is over
    pairs = [
        (t, s) for t in range(length) for s in range(t + 1 if causal else length) if float(one[t, s].detach()) > _HIDDEN
    ]
    taken: dict[int, dict[tuple[int, int], Tensor]] = {n: {} for n in range(len(seen.products))}
    for pair in pairs:
        gradients = torch.autograd.grad(one[pair], seen.products, retain_graph=True, allow_unused=True)
        for number, gradient in enumerate(gradients):
            taken[number][pair] = torch.empty(0, 0) if gradient is None else gradient.nonzero()
    found = [
        _Read(read[0], read[1], seen.padded.get(number, ""))
        for number, product in enumerate(seen.products)
        if (read := _by_rows(product.shape, taken[number], length)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _by_rows(
    shape: torch.Size, taken: Mapping[tuple[int, int], Tensor], length: int
) -> tuple[int, dict[tuple[int, int], tuple[int, int] | None]] | None:
    """Return columns and places, where pairs take one number at most of a product, and not that of their key."""
    found = {pair: [int(n) for n in at[0]] for pair, at in taken.items() if len(at) == 1}
    if any(len(at) > 1 for at in taken.values()) or 2 * len(found) < len(taken) or len(found) < 3:
        return None
    varying = [axis for axis in range(len(shape)) if len({at[axis] for at in found.values()}) > 1]
    if len(varying) != 2:
        return None
    matching = {axis: sum(at[axis] == t for (t, _), at in found.items()) for axis in varying if shape[axis] == length}
    if not matching:
        return None
    row = max(matching, key=lambda axis: matching[axis])
    column = next(axis for axis in varying if axis != row)
    if 2 * matching[row] < len(found) or all(at[column] == s for (_, s), at in found.items()):
        return None  # the second is the product of queries and keys
    return shape[column], {p: (found[p][row], found[p][column]) if p in found else None for p in taken}


def _diagonal(read: _Read) -> tuple[int, int] | None:
    """Return sign and start of the diagonals, of `column = start + sign (s - t)`, which most pairs take."""
    own = [(t, s, at[1]) for (t, s), at in read.places.items() if at is not None and at[0] == t]
    counted = Counter((sign, column - sign * (s - t)) for t, s, column in own for sign in (1, -1))
    (best, many), *others = counted.most_common(2)
    is_clear = 2 * many > len(own) and (not others or others[0][1] < many)
    return best if is_clear else None


def _due(read: _Read, line: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Return the column that each pair would take on diagonals."""
    sign, start = line
    return {(t, s): start + sign * (s - t) for t, s in read.places}


def _follows(read: _Read, line: tuple[int, int] | None) -> bool:
    """Whether every pair takes the number of its diagonal in its own row, and none where the columns are at an end."""
    if line is None:
        return False
    due = _due(read, line)
    return all(
        at == ((pair[0], due[pair]) if 0 <= due[pair] < read.columns else None) for pair, at in read.places.items()
    )


def _outside(short: _Read, long: _Read, length: int) -> str | None:
    """Say that columns are read too far along: the last one would stand behind the product, and there is none."""
    line = _diagonal(short)
    if line is None or not _follows(short, line) or not _follows(long, _diagonal(long)):
        return None  # something else than a diagonal that runs out
    due = _due(short, line)
    missing = sorted(pair for pair, at in short.places.items() if at is None)
    beyond = {due[pair] for pair in missing}
    if not missing or any(long.places.get(pair) is None for pair in missing):
        return None  # of what is missing at any length no length is the reason
    unread = sorted(set(range(short.columns)) - set(due.values()))
    above = all(column >= short.columns for column in beyond)
    free = list(range(len(beyond))) if above else list(range(short.columns - len(beyond), short.columns))
    if not (above or all(column < 0 for column in beyond)) or unread != free:
        return None  # a product of too few columns, say
    (t, s), many = missing[0], len(beyond)
    filled = " (the padding of the shift)" if short.padded else ""
    steps = "one column" if many == 1 else f"{many} columns"
    wanted = "left" if short.padded == "right" else "right"
    padding = (
        f": the shift pads them on the {short.padded}, where its way of cutting rows needs the {wanted}"
        if short.padded == ("right" if above else "left")
        else ""
    )
    place = f"column {due[t, s]}" if above else f"a column before the first ({due[t, s]})"
    return (
        f"scores by distance are read {steps} too far to the {'right' if above else 'left'}: with {length} positions "
        f"they have {short.columns} columns, 0 to {short.columns - 1}, the score of query {t} on key {s} would be in "
        f"{place} and is none of them{filled}, and column {', '.join(map(str, unread))} is read by "
        f"no pair{padding}"
    )


def _wrapped(short: _Read, long: _Read) -> str | None:
    """Say that pairs on one side of the query take the numbers of another query's row."""
    if _diagonal(short) is None:
        return None
    odd = [(t, s, at[0]) for (t, s), at in short.places.items() if at is not None and at[0] != t]
    odd_in_long = any(at is not None and at[0] != t for (t, _), at in long.places.items())
    behind, before = (bool(odd) and all(sign * (s - t) > 0 for t, s, _ in odd) for sign in (1, -1))
    if not odd_in_long or not (behind or before):
        return None
    t, s, r = odd[0]
    return (
        f"scores by distance of keys {'behind' if behind else 'before'} the query are those of another query, that of "
        f"query {t} on key {s} is read from the row of query {r}: they have {short.columns} columns, and the shift "
        "runs over the end of a row into another one"
    )
