"""The documented defects that the zoo stands for: `documented.jsonl`, and those that no program here can show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Bug:
    """A defect that was found in released code.

    Attributes:
        id: of the defect, `CM01`.
        area: of the Transformer.
        title: one sentence.
        citation: threads in which it is documented.
        description: what went wrong.
        preconditions: without which it does not show.
        severity: critical, high, medium or low.
    """

    id: str
    area: str
    title: str
    citation: str
    description: str
    preconditions: str
    severity: str


@cache
def documented() -> Mapping[str, Bug]:
    """Return every documented defect by id."""
    lines = (Path(__file__).parent / "documented.jsonl").read_text(encoding="utf-8").splitlines()
    return {bug.id: bug for bug in (Bug(**json.loads(line)) for line in lines)}


NOT_EXPRESSED: Mapping[str, str] = {
    "NM11": "its error is one rounding of bfloat16 more (2^-9), which right implementations of RMSNorm differ by too "
    "(one casts before the gain, another behind): no claim can fail it and pass them",
    "EM05": "sqrt(d) rounded to bfloat16 is off by 2^-9 at most, as is every bfloat16 product: no claim can fail it "
    "and pass a right bfloat16 model; its coarser form, a door without the factor, is the fault EM-door",
    "RB07": "shows between the pixels of two-dimensional windows; the kinds of subject map sequences",
    "RB08": "shows between the pixels of three-dimensional windows; the kinds of subject map sequences",
    "PE06": "an odd width raises while the model is built, so that nobody is misled; the sizes that are drawn are "
    "even, which right implementations of sines and cosines in pairs may demand",
    "OP03": "counted from 1, as the formula is, step 0 never comes; counted from 0 the first rate is used twice, as "
    "the reference and the common schedulers do rather than divide by zero: no claim can fail it and pass them",
    "EX03": "kernels that sum in another order for another batch differ by rounding, which every tolerance allows; "
    "that they do not, to the bit, is a claim that no kind of subject makes",
}
"""Documented defects without a fault in the zoo, each with the reason."""
