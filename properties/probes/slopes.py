"""A probe of a relative bias: whether it falls with the distance, as that of ALiBi does, and by which slopes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veriformer.properties.anatomy.describing import alibi_slopes_of
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.probes.findings import Finding, Question, a_case
from veriformer.reference.position_bias import alibi_slopes

_LENGTH = 9
_NEAR = 1e-5


def slopes_of_the_bias(bench: Workbench) -> Iterator[Finding]:
    """Read the past off the last query: a bias that is straight in the distance is ALiBi's, or was to be."""
    if bench.subject.kind != "position_bias":
        return
    case = a_case(bench)
    built = case.built()
    with torch.no_grad():
        bias = case.call(built, _LENGTH, _LENGTH).detach().cpu().double()
    slopes = alibi_slopes_of(bias, torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril())
    if slopes is None or bool((slopes.abs() < _NEAR).all()):
        return
    published = torch.tensor(alibi_slopes(len(slopes)), dtype=torch.float64)
    seen = "the bias is straight in the distance"
    if bool(((slopes / published - 1).abs() < _NEAR).all()):
        yield Finding("positions", "alibi", f"{seen}, with the published slopes of ALiBi")
        return
    own, right = (", ".join(f"{slope:.4g}" for slope in some.tolist()[:4]) for some in (slopes, published))
    why = f"the slopes are {own}, and those of ALiBi {right}"
    text = f"{seen}, but {why}: a defect, or by design?"
    asks = Question("position-bias.relative", text, "positions='other'")
    yield Finding("positions", "other", why, is_fact=False, told=False, asks=asks)
