"""Feed-forward networks that are the textbook's but for a number: a multiple of an activation explains them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from veriformer.properties.anatomy.feed_forward import ACTIVATIONS, TINY
from veriformer.properties.anatomy.sources import LINEAR
from veriformer.properties.anatomy.traced import Value
from veriformer.properties.twin.looking import Look
from veriformer.properties.twin.parts import NumberError

_BEHIND = 12  # values before a map that its input may be made of
_ONE = 1e-5


def require_no_number(look: Look, start: int, end: int, place: str) -> None:
    """Require that no feed-forward network is there whose inner numbers are multiplied by one too many.

    Args:
        look: the forward.
        start: number of the value behind which it stands.
        end: number of the value before which it does.
        place: the attention before it.

    Raises:
        NumberError: one is, and by what.
    """
    for product in look.seen.products:
        if not start < product.when < end or product.output.shape[-1] != look.width:
            continue
        taken = product.left.cpu().double().flatten()
        values = [v for v in look.seen.values[start : product.when] if v.output.numel() == len(taken)][-_BEHIND:]
        for name, before, behind in _factors(look, values, taken):
            if max(abs(before - 1), abs(behind - 1)) > _ONE:
                raise NumberError(
                    f"the feed-forward network behind {place} multiplies what its {name} is given by {before:.6g} and "
                    f"what it gives by {behind:.6g}"
                )


def _factors(look: Look, values: list[Value], taken: Tensor) -> Iterator[tuple[str, float, float]]:
    """Yield activations that explain what a map takes, with factors before and behind them."""
    linear = [v for v in values if v.name in LINEAR]
    size = look.limit * float(taken.abs().amax())
    for name, function in ACTIVATIONS.items():
        if name == "identity":
            continue
        for value in (v for v in values if float(v.output.abs().amax()) >= TINY):
            made = function(value.output.double().flatten())
            for other in (None, *values):
                whole = made if other is None else made * other.output.double().flatten()
                behind = float((whole @ taken) / (whole @ whole).clamp(min=1e-300))
                if float((taken - behind * whole).abs().amax()) > size or other is value:
                    continue
                before = [look.multiple(value.output, v.output) for v in linear]
                yield name, next((f for f in before if f is not None), 1.0), behind
