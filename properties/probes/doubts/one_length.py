"""What models of one length show: whom a cell of a grid sees, whether a series' own scale comes back in what is given.

Asked of subjects that take numbers and declare their one length, as first contact does for what it lays out itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.probes.findings import Finding, Question, a_stream

_NEAR = 1e-4
"""Relative differences that are rounding in float32, and what eps makes of ordinary numbers."""
_MOST = 256  # cells that are looked at
_SHARE = 0.25
"""Cells that see none of their neighbours, of those that see any: singled out at borders are fewer."""


def lone_length(bench: Workbench) -> Iterator[Finding]:
    """Look at a whole sequence of the one length: whether a cell sees its neighbours, and a constant comes back."""
    subject = bench.subject
    length = int(subject.fact("max_len", 0))
    if subject.kind != "classifier" or subject.takes_tokens or length < 4 or subject.fact("structure") == "other":
        return
    stream = a_stream(bench)
    width = stream.built.config.d_model
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, length, width, generator=generator).to(bench.device, stream.built.dtype)
    with torch.no_grad():
        given = stream(x)
        if given.shape[1] == length * width and length <= _MOST:
            share = strangers(stream, x)
            if share > _SHARE:
                text = (
                    f"{share:.0%} of the {length} positions see others and none of their neighbours: is what attention "
                    "gave put back at another place than it was taken from (a shift that is not undone)?"
                )
                yield _asked("neighbours", "not seen", text)
        elif (factor := factor_of_a_constant(stream, x)) is not None:
            text = (
                f"a constant that is added to a series comes out multiplied by {factor:.3g}, which changes with the "
                "series: is its normalisation undone in another order?"
            )
            yield _asked("scale of a series", f"{factor:.3g}", text)


def _asked(name: str, value: str, text: str) -> Finding:
    asks = Question("batch.independence", text, "structure='other'")
    return Finding(name, value, "on a whole sequence", is_fact=False, told=False, asks=asks)


def strangers(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the share of positions that see others and none of their neighbours, of those that see others.

    Args:
        run: gives as many numbers as it is given, `[B, T * D]`.
        x: one sequence `[1, T, D]`; of a square number of positions they are the cells of a square.
    """
    length = x.shape[1]
    side = math.isqrt(length)
    moved = x.repeat(length, 1, 1)
    at = torch.arange(length, device=x.device)
    moved[at, at] = x[0].flip(-1) * 2 + 1
    apart = (run(moved) - run(x)).detach().view(length, length, -1).abs().amax(-1)  # [changed, seen in]
    sees = (apart > _NEAR * apart.diagonal().mean()).mT
    sees.fill_diagonal_(False)
    if side * side == length:
        rows, columns = at // side, at % side
        near = (rows[:, None] - rows).abs() + (columns[:, None] - columns).abs() == 1
    else:
        near = (at[:, None] - at).abs() == 1
    some = sees.any(1)
    lost = some & ~(sees & near).any(1)
    return float(lost.sum() / some.sum().clamp(min=1))


def factor_of_a_constant(run: Callable[[Tensor], Tensor], x: Tensor) -> float | None:
    """Return the factor by which a constant that is added to a series comes out, where another series has another.

    None where outputs do not go by straight lines with the constant (nothing takes it out, as a normalisation would and
    puts it back), or do not move, or all is linear.

    Args:
        run: gives the outputs `[1, C]` of a series.
        x: `[1, T, D]`.
    """
    factors = []
    for series in (x, 3 * x):
        plain, one, two = (run(series + c).detach() for c in (0.0, 1.0, 2.0))
        step = one - plain
        size = float(step.abs().amax())
        if not size or float((two - one - step).abs().amax()) > _NEAR * max(size, float(plain.abs().amax())):
            return None
        factors.append(step)
    first, other = factors
    if float((other - first).abs().amax()) <= 0.01 * float(first.abs().amax()):
        return None
    return float(first.mean())
