"""The attention scale inside a whole model."""

from __future__ import annotations

import torch

from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.probes.observed_scale import ObservedScale, ScaleWatch
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
    built = case.built()
    stream = Stream(case, built)
    x = stream.draw(2, case.length("T", low=3, high=6))
    with ScaleWatch() as watch, torch.no_grad():
        stream(x)
    declared = case.subject.fact("attention_scale")
    for seen in watch.found:
        wide = seen.d_head * built.config.num_heads
        if declared is not None:
            _is(case, seen, attention_scale(declared, seen.d_head, wide), "the declared one")
            continue
        for wrong, words in ((wide**-0.5, "1/sqrt(d_model)"), (seen.d_head**0.5, "sqrt(d_head)")):
            right = seen.d_head**-0.5
            if built.config.num_heads > 1 and abs(seen.factor / wrong - 1) < 1e-3 < abs(wrong / right - 1):
                case.require(
                    False,
                    f"scores are multiplied by {words} instead of 1/sqrt(d_head)",
                    got=f"{seen.factor:.6g}",
                    expected=f"{right:.6g}",
                    error=abs(seen.factor / right - 1),
                    tolerance=1e-3,
                    cause=lambda words=words: f"the measured scale is {words}",  # type: ignore[misc]
                )
    if watch.found:
        case.witness()


def _is(case: Case, seen: ObservedScale, wanted: float, words: str) -> None:
    error = abs(seen.factor / wanted - 1)
    # the factor is a least-squares fit that a misfit of 1e-4 ends
    case.require(
        error < 1e-3,
        f"the scale inside the model is not {words}",
        got=f"{seen.factor:.6g}",
        expected=f"{wanted:.6g}",
        error=error,
        tolerance=1e-3,
    )
