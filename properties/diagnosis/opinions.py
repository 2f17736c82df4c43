"""Who is asked when a property's own measurement names no cause, or a place alone.

An opinion measures the subject anew and off the record, at sizes of its own or those of the failing case. It speaks
only where what it measured would have come out otherwise under the other causes that it knows; else it is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.batches import TOKENWISE
from veriformer.properties.diagnosis.precision import precision_cause
from veriformer.properties.diagnosis.rows import misplaced
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.stream import SEQUENCES
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
    """

    measure: Callable[[Case, Violation], str | None]
    kinds: tuple[str, ...]
    properties: tuple[str, ...]


_ORDINARY = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("positions", "position_bias"))

OPINIONS: tuple[Opinion, ...] = (
    Opinion(rounding_cause, ("rotary",), ("rotary.precision", "numerics.")),
    Opinion(rotation_cause, ("rotary",), ("rotary.",)),
    Opinion(precision_cause, _ORDINARY, ("numerics.precision-ladder",)),
    Opinion(
        misplaced,
        (*SEQUENCES, *TOKENWISE),
        (
            "batch.",
            "ffn.position-wise",
            "norm.per-token",
            "dropout.mean",
            "padding.",
            "permutation.",
            "positions.",
            "attention.attends",
            "numerics.stateless",
            "training.",
        ),
    ),
)
"""In the order in which they are asked; the first that speaks is believed."""


def second_opinion(prop: Property, case: Case, problem: Violation) -> str | None:
    """Return what explains a failure, from the first opinion that has one; what breaks while measuring is silent."""
    for opinion in OPINIONS:
        if case.subject.kind in opinion.kinds and prop.id.startswith(opinion.properties):
            try:
                with off_the_record(case):
                    told = opinion.measure(case, problem)
            except Exception:  # whatever goes wrong here must not hide the violation itself
                continue
            if told:
                return told
    return None
