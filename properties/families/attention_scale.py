"""The attention scale inside a whole model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import followed
from veriformer.properties.anatomy.flow import flow
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.probes.observed_scale import ScaleWatch
from veriformer.properties.subject.facts import attention_scale
from veriformer.properties.subject.subject import Subject


def _watched(subject: Subject) -> str | None:
    if subject.fact("observed_scale"):
        return None
    return "no score could be followed from q k^T to a softmax (fused kernel, bias, or scaled queries)"


@holds(
    "attention.model-scale",
    statement="Inside a whole model, scores are scaled by what is declared, and never by the width of the model.",
    formula="softmax input = scale q k^T with the declared scale; never 1/sqrt(d_model), never sqrt(d_head)",
    source="Vaswani et al. 2017, section 3.2.1.",
    kinds=("layer", "encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=(needs_module, _watched, excludes_fact("soft_cap"), excludes_fact("query_key_norm")),
    examples_factor=0.25,
    catches=("SC02", "SC04"),
)
def models_scale_by_the_head(case: Case) -> None:
    """Read off while the model runs. Without a declaration other scales are conventions (none at all, where queries
    are scaled before or the initialisation does it; 1/d_head) and pass; two are mistakes in any convention: the
    width of the model in place of that of a head, and multiplying where it should divide.
    """
    declared = case.subject.fact("attention_scale")
    with off_the_record(case):
        flowing = flow(case)
        whole = [(s, a.query.shape[-1]) for a in followed(flowing.seen) for s in a.scale if s is not None]
        if not whole:
            case.does_not_apply("no scale could be followed from the projections to the weights")
    if declared is not None and all(_is_near(s, attention_scale(declared, k, flowing.width)) for s, k in whole):
        # rotations that stretch (YaRN) have a part of the scale, which the scores alone do not show
        for scale, d_head in whole:
            _is(case, torch.tensor(scale), attention_scale(declared, d_head, flowing.width), "the declared one")
        case.witness()
        return
    built = case.built()
    stream = Stream(case, built)
    x = stream.draw(2, case.length("T", low=3, high=6))
    found = case.apply(scales_inside, case.caller(built, *stream.inputs(x)))
    for seen, d_head in found:
        factor, wide = torch.tensor(seen, dtype=torch.float64), d_head * built.config.num_heads
        if declared is not None:
            _is(case, factor, attention_scale(declared, d_head, wide), "the declared one")
            continue
        for wrong, words in ((wide**-0.5, "1/sqrt(d_model)"), (d_head**0.5, "sqrt(d_head)")):
            right = d_head**-0.5
            if built.config.num_heads > 1 and abs(wrong / right - 1) > 1e-3:
                case.require(
                    (factor / wrong - 1).abs() >= 1e-3,
                    f"scores are multiplied by {words} instead of 1/sqrt(d_head)",
                    got=f"{factor:.6g}",
                    expected=f"{right:.6g}",
                    error=(factor / right - 1).abs(),
                    tolerance=1e-3,
                    cause=lambda words=words: f"the measured scale is {words}",  # type: ignore[misc]
                    asks=("attention_scale", float(f"{seen:.6g}")),
                )
    if found:
        case.witness()


def scales_inside(run: Callable[[], object]) -> list[tuple[float, int]]:
    """Return the scales that are seen in a call, each with the width of its heads."""
    with ScaleWatch() as watch:
        run()
    return [(scale.factor, scale.d_head) for scale in watch.found]


def _is_near(scale: float, wanted: float) -> bool:
    return abs(scale / wanted - 1) < 1e-3


def _is(case: Case, factor: Tensor, wanted: float, words: str) -> None:
    error = (factor / wanted - 1).abs()
    # the factor is a least-squares fit that a misfit of 1e-4 ends
    case.require(
        error < 1e-3,
        f"the scale inside the model is not {words}",
        got=f"{factor:.6g}",
        expected=f"{wanted:.6g}",
        error=error,
        tolerance=1e-3,
    )
