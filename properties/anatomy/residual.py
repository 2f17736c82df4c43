"""How what a sublayer gives is added to the stream, told by its numbers: `stream = a x + b sublayer(...)`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veriformer.properties.anatomy.traced import Traced, Value

_NEXT = 40  # values between a map's output and the sum that takes it: dropouts, norms, casts, a bias, another sublayer
_BACK = 160  # values before that the stream may be: a sublayer's own


@dataclass(frozen=True)
class Sum:
    """One sum of the stream and what a linear map gave.

    Attributes:
        place: path of the module whose map it is.
        stream: by which the stream is multiplied.
        branch: by which what is added is.
        when: number of the sum among the values.
    """

    place: str
    stream: float
    branch: float
    when: int


def residual_sums(seen: Traced, width: int) -> list[Sum]:
    """Return the sums of a stream of some width in a forward, in order."""
    found: list[Sum] = seen.once(("sums", width), lambda: _residual_sums(seen, width))
    return found


def _residual_sums(seen: Traced, width: int) -> list[Sum]:
    found = []
    for product in seen.products:
        if product.output.shape[-1] != width or product.right.shape[:-2].numel() > 1:
            continue
        if one := _sum_of(seen.values, product.when, product.place, seen.limit):
            found.append(one)
    return found


def _sum_of(values: list[Value], when: int, place: str, limit: float) -> Sum | None:
    branch = _flat(values[when].output)
    later = [v for v in values[when + 1 : when + _NEXT] if v.output.numel() == branch.numel()]
    behind = [v for v in later if v.name == "add"]
    for total in behind:
        y = _flat(total.output)
        biased = [branch]
        before = [v for v in later if v.when < total.when and v.name == "add"]
        biased += [
            _flat(v.output) for v in before if _is_row_shift(_flat(v.output), branch, total.output.shape[-1], limit)
        ]
        for b in biased:
            square = (b @ b).clamp(min=1e-300)
            for value in reversed(values[max(0, when - _BACK) : when]):
                if value.output.numel() != y.numel():
                    continue
                x = _flat(value.output)
                own = x - (x @ b) / square * b
                size = own @ own
                if float(size) <= 1e-12 * float(x @ x):
                    continue
                a = (own @ y) / size
                c = ((y - a * x) @ b) / square
                explains = float((y - a * x - c * b).abs().amax()) <= limit * float(y.abs().amax())
                if explains and min(abs(float(a)), abs(float(c))) > limit:
                    return Sum(place, float(a), float(c), total.when)
    return None


def _flat(x: Tensor) -> Tensor:
    return x.double().reshape(-1)


def _is_row_shift(one: Tensor, other: Tensor, width: int, limit: float) -> bool:
    """Whether two values differ by one row that all tokens share: a bias was added."""
    apart = (one - other).reshape(-1, width)
    return bool((apart - apart[:1]).abs().amax() <= limit * one.abs().amax())
