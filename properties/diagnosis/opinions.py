"""Who is asked when a property's own measurement names no cause, or a place alone.

An opinion measures the subject anew and off the record, at sizes of its own or those of the failing case. It speaks
only where what it measured would have come out otherwise under the other causes that it knows; else it is silent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from veriformer.properties.causes.asking import answer_to
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.causes.tracing.lone_axes import lone_axis_opinion
from veriformer.properties.diagnosis.attention.ghosts import ghost_opinion
from veriformer.properties.diagnosis.attention.merged import merge_opinion
from veriformer.properties.diagnosis.attention.modules import module_opinion
from veriformer.properties.diagnosis.attention.relative_columns import relative_opinion
from veriformer.properties.diagnosis.attention.shifted_scores import shift_opinion
from veriformer.properties.diagnosis.conditions import condition_of
from veriformer.properties.diagnosis.derivatives.gradients import gradient_opinion
from veriformer.properties.diagnosis.derivatives.nan_gradients import nan_opinion
from veriformer.properties.diagnosis.distances import distance_opinion
from veriformer.properties.diagnosis.kernels.kernels import kernel_condition, kernel_opinion
from veriformer.properties.diagnosis.kernels.tiles import tile_opinion
from veriformer.properties.diagnosis.losses import loss_opinion
from veriformer.properties.diagnosis.masks.inside import mask_opinion
from veriformer.properties.diagnosis.norms import wrong_widths
from veriformer.properties.diagnosis.places.batches import TOKENWISE
from veriformer.properties.diagnosis.places.lookups import lookup_opinion
from veriformer.properties.diagnosis.places.nonfinite import nonfinite_opinion
from veriformer.properties.diagnosis.places.overwriting import overwriting_opinion
from veriformer.properties.diagnosis.places.positions import odd_positions
from veriformer.properties.diagnosis.places.rows import misplaced, of_other_samples
from veriformer.properties.diagnosis.places.unwritten import unwritten_opinion
from veriformer.properties.diagnosis.places.written import written_opinion
from veriformer.properties.diagnosis.precision import precision_cause
from veriformer.properties.diagnosis.unsteady import NOISY, UNSTEADY, noise_opinion, unsteady_opinion
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RecordedDraws
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.stream import PER_POSITION, SEQUENCES
from veriformer.properties.engine.violations import Violation
from veriformer.properties.formulas.rotations import rotation_cause, rounding_cause
from veriformer.properties.subject.inputs import has_ordinary_inputs
from veriformer.properties.subject.kinds import KINDS


@dataclass(frozen=True)
class Opinion:
    """One measurement that may explain failures.

    Attributes:
        measure: takes the smallest failing case and its violation; returns one sentence, or None.
        kinds: of subjects that it can look at.
        properties: beginnings of the ids of properties whose failures it can explain.
        rank: "first" of all, "before" the property's own measurement, or "after" it, where that says nothing.
    """

    measure: Callable[[Case, Violation], str | None]
    kinds: tuple[str, ...]
    properties: tuple[str, ...]
    rank: str = "after"


_EVERY = tuple(KINDS)
_ORDINARY = tuple(k for k in KINDS if has_ordinary_inputs(k) and k not in ("positions", "position_bias"))
_WHOLE = ("encoder", "decoder", "encoder_decoder", "classifier")
_FACT = re.compile(r"declare \w+=")
_OF_ROWS = (
    "attention.attends", "batch.", "dropout.mean", "ffn.position-wise", "norm.per-token", "numerics.stateless",
    "padding.", "permutation.", "positions.", "training.",
)  # fmt: skip
_OF_ROUTES = ("batch.", "ffn.", "gradients.", "parameters.all-used", "permutation.", "router.", "training.", "twin.")
_OF_MASKS = ("attention.", "batch.", "cross_attention.", "padding.", "permutation.")
_OF_MERGES = ("attention.", "batch.", "causality.", "cross_attention.", "padding.", "permutation.", "rotary.", "twin.")
_OF_LENGTHS = ("causality.prefix", "decoding.", "padding.", "permutation.")
_OF_GHOSTS = (
    "attention.masked-equals-removed", "cross_attention.", "padding.amount", "padding.content", "padding.left",
    "padding.every-position",
)  # fmt: skip
_OF_SHIFTS = ("attention.masked-equals-removed", "causality.no-future", "causality.prefix", "padding.", "twin.")
_OF_GRADIENTS = (
    "attention.", "dropout.", "gradients.", "loss.", "norm.", "permutation.", "residual.", "rotary.", "softmax.",
)  # fmt: skip
_OF_WEIGHTS = ("attention.", "causality.", "cross_attention.", "gradients.", "padding.")
_OF_NAN = ("attention.empty-row", "gradients.finite", "norm.", "padding.", "softmax.")

OPINIONS: tuple[Opinion, ...] = (
    Opinion(nonfinite_opinion, _ORDINARY, ("batch.", "causality.", "numerics.", "padding.", "permutation."), "first"),
    Opinion(unsteady_opinion, _EVERY, UNSTEADY, "first"),
    Opinion(noise_opinion, _EVERY, NOISY, "first"),
    Opinion(of_other_samples, SEQUENCES, _OF_MASKS, "before"),
    Opinion(loss_opinion, ("loss",), ("gradients.",), "before"),
    Opinion(tile_opinion, ("attention",), ("attention.tiles",), "before"),
    Opinion(kernel_opinion, ("attention",), _OF_WEIGHTS, "before"),
    Opinion(merge_opinion, (*_WHOLE, "layer", "self_attention", "cross_attention"), _OF_MERGES, "before"),
    Opinion(ghost_opinion, SEQUENCES, _OF_GHOSTS, "before"),
    Opinion(shift_opinion, ("self_attention", "layer"), _OF_SHIFTS, "before"),
    Opinion(relative_opinion, (*_WHOLE, "layer", "self_attention"), _OF_SHIFTS, "before"),
    Opinion(distance_opinion, (*_WHOLE, "layer", "self_attention"), ("attention.masked-equals-removed", "padding.")),
    Opinion(mask_opinion, (*_WHOLE, "layer"), ("causality.no-future", "causality.prefix"), "before"),
    Opinion(module_opinion, ("self_attention", "cross_attention"), _OF_WEIGHTS, "before"),
    Opinion(unwritten_opinion, ("softmax",), ("gradients.", "permutation.", "softmax."), "before"),
    Opinion(rounding_cause, ("rotary",), ("rotary.precision", "numerics.")),
    Opinion(rotation_cause, ("rotary",), ("rotary.",)),
    Opinion(precision_cause, _ORDINARY, ("numerics.precision-ladder",)),
    Opinion(lookup_opinion, _WHOLE, ("permutation.broken", "positions.order", "parameters.all-used"), "before"),
    Opinion(lone_axis_opinion, _ORDINARY, ("padding.", "parameters.all-used", "training."), "before"),
    Opinion(overwriting_opinion, _ORDINARY, _OF_ROUTES, "before"),
    Opinion(written_opinion, (*_WHOLE, "layer"), ("anatomy.residual", "residual.", "layer.composition"), "before"),
    Opinion(misplaced, (*SEQUENCES, *TOKENWISE), _OF_ROWS),
    Opinion(odd_positions, PER_POSITION, _OF_LENGTHS),
    Opinion(wrong_widths, ("norm",), ("gradients.", "norm.")),
    Opinion(nan_opinion, _ORDINARY, _OF_NAN),
    Opinion(gradient_opinion, _ORDINARY, _OF_GRADIENTS),
    Opinion(kernel_condition, ("attention",), _OF_WEIGHTS),
)
"""In the order in which they are asked; the first that speaks is believed."""


def cause_of(prop: Property, case: Case, problem: Violation) -> str:
    """Return what explains a failure, in one sentence, or an empty one."""
    case.go_on()
    if told := _first_of(prop, case, problem, "first"):
        return told
    own = answer_to(problem.cause)
    is_asked = bool(own and _FACT.search(own))  # the fact that takes the failure back is asked about
    told = own
    if not is_asked:
        told = _first_of(prop, case, problem, "before") or own or _first_of(prop, case, problem, "after")
    if told:
        return told
    with off_the_record(case):
        return answer_to(lambda: condition_of(prop, case)) or ""


def _first_of(prop: Property, case: Case, problem: Violation, rank: str) -> str | None:
    for opinion in OPINIONS:
        if opinion.rank != rank or case.subject.kind not in opinion.kinds:
            continue
        if prop.id.startswith(opinion.properties):
            again = Case(case.bench, RecordedDraws(case.choices))  # may draw more than the search did
            with off_the_record(again):
                told = answer_to(lambda opinion=opinion, again=again: opinion.measure(again, problem))  # type: ignore[misc]
            if told:
                return told
    return None
