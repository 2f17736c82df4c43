"""What a study says beside accuracy: numbers of each seed, the answer that is made of them, and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from veriformer.ablations.statistics.answers import ANSWERS
from veriformer.ablations.studies.study import Study

Records = Sequence[Mapping[str, Any]]


def _entropies(records: Records) -> dict[str, Any]:
    """Return each seed's entropy by observation and layer, mean over heads; and what its heads are worth."""
    through = [[[_mean(layer) for layer in step] for step in r["curves"]["entropy"]] for r in records]
    heads = [r["heads"] for r in records if "heads" in r]
    return {"entropy": through, "by_head": [r["curves"]["entropy"][-1] for r in records], "heads": heads}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


_NEEDED: Mapping[str, Callable[[Records], dict[str, Any]]] = {
    "calibration": lambda records: {"calibration_error": [r["calibration_error"] for r in records]},
    "lengths": lambda records: {
        "lengths": {length: [r["lengths"][length] for r in records] for length in records[0]["lengths"]}
    },
    "entropy": _entropies,
    "scaling-law": lambda records: {"loss": [r["loss"] for r in records]},
}
"""Numbers of each seed that an answer needs, by the name of the answer."""


def beside(records: Records, fit: str) -> dict[str, Any]:
    """Return what a row's record holds of each seed for the study's answer; nothing where it needs none."""
    return {"of_seeds": _NEEDED[fit](records)} if fit in _NEEDED else {}


def answer(study: Study, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is made of a study's rows, with what became of what was expected."""
    made = ANSWERS[study.fit](rows)
    found = made.get("found", {})
    made["expectations"] = [
        {
            "about": e.about,
            "expects": [_finite(e.low), _finite(e.high)],
            "source": e.source,
            "registered": e.registered,
            "found": found.get(e.about),
            "outcome": e.outcome(found.get(e.about)),
        }
        for e in study.expectations
    ]
    made["lines"] = [*made["lines"], *(_line(e) for e in made["expectations"])]
    return made


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(told: Mapping[str, Any]) -> str:
    # a strict bound at zero is one that is next to it
    low, high = (None if v is None else f"{round(v, 6) + 0.0:.3g}" for v in told["expects"])
    if low is not None and high is not None:
        expected = f"{low} to {high}"
    else:
        expected = f"above {low}" if low is not None else f"below {high}"
    return f"predicted: {told['about']} {expected} ({told['source']}): {told['outcome']}"
