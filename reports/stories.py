"""What failed, told once for each cause: which failures are one story, which of them tells it, with which picture."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_SIZES = ("B", "T", "S")  # labels of choices that make a case large
_MENDED = re.compile(r"one change makes it right: .*? at [^\s`]+:\d+(; or .*? at [^\s`]+:\d+)?(?=; |$)")
"""What mends a failure: whatever it mends is one story."""
_UNSTEADY = ("dropout.eval-deterministic", "numerics.stateless")
"""What fails where a model answers otherwise each time: first, since it explains whatever else fails of it."""

_OF_LOSS = "the loss itself is wrong: "
_FOLLOWING = ("gradients.", "decoding.generate")
_INSIDE = "anatomy"  # the family that looks inside a running model: where a fault is that others see from outside


@dataclass(frozen=True)
class Story:
    """Failures of one cause.

    Attributes:
        told: the result whose case is told: the simplest, with the picture of another one where it has none.
        others: the other results that fail of this cause.
    """

    told: Mapping[str, Any]
    others: Sequence[Mapping[str, Any]]

    @property
    def case(self) -> Mapping[str, Any]:
        """The smallest failing case."""
        found: Mapping[str, Any] = self.told["counterexample"]
        return found


def stories(subject: Mapping[str, Any]) -> list[Story]:
    """Return the failures of a subject by their cause, the simplest first.

    Failures are of one cause if one change of code mends them; if the same words name it, numbers apart, or the same
    words and more; what was seen inside the model (`anatomy.mask`) belongs to the cause that names that part. Where no
    cause was found, each stands for itself, or belongs to the cause that it says itself.

    Args:
        subject: of a report under `veriformer-report/1`.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in subject["results"]:
        if result["outcome"] == "FAIL" and result.get("counterexample"):
            cause = cause_of(result).removeprefix(_OF_LOSS)
            key = found[0] if (found := _MENDED.search(cause)) else _NUMBER.sub("#", cause)
            groups.setdefault(key or result["id"], []).append(result)
    for key, (first, *_) in list(groups.items()):
        said = _NUMBER.sub("#", first["counterexample"].get("headline", "")) if key == first["id"] else key
        if home := next((k for k in groups if k != key and said in (k, k.partition(", ")[0])), None):
            groups[home] += groups.pop(key)
    for key in [k for k, found in groups.items() if all(_family(r) == _INSIDE for r in found)]:
        part = groups[key][0]["id"].partition(".")[2].partition("-")[0]
        outside = (k for k, found in groups.items() if k != key and _family(found[0]) != _INSIDE)
        if home := next((k for k in outside if re.search(rf"\b{part}", cause_of(groups[k][0]))), None):
            groups[home] += groups.pop(key)
    told = [_story(sorted(found, key=_rank)) for found in groups.values()]
    return sorted(told, key=lambda story: _rank(story.told))


def _rank(result: Mapping[str, Any]) -> tuple[int, tuple[bool, bool, bool, bool, float]]:
    """Return what failures and stories are sorted by: first that answers change from call to call, then simplicity."""
    id_ = result["id"]
    return _UNSTEADY.index(id_) if id_ in _UNSTEADY else len(_UNSTEADY), difficulty(result)


def difficulty(result: Mapping[str, Any]) -> tuple[bool, bool, bool, bool, float]:
    """Return what failures are sorted by: those that name a cause first, then with a picture, then the small ones.

    What follows from others comes behind them: gradients of a wrong forward, what is generated through a wrong cache.
    """
    case = result.get("counterexample") or {}
    sizes = (case.get("choices", {}).get(label) for label in _SIZES)
    size = math.prod(s for s in sizes if type(s) is int and s > 0)
    follows = result["id"].startswith(_FOLLOWING)
    return (not case.get("cause"), follows, _family(result) == _INSIDE, not case.get("influence"), size)


def _story(found: Sequence[Mapping[str, Any]]) -> Story:
    first, *others = found
    case = first["counterexample"]
    picture = next((p for r in found if (p := r["counterexample"].get("influence"))), None)
    inside = [cause for r in others if _family(r) == _INSIDE and (cause := cause_of(r)) != case.get("cause")]
    own = case.get("cause", "")
    more = next((cause for r in others if own and (cause := cause_of(r)).startswith(f"{own}, ")), own)
    cause = "; seen inside: ".join([more, *dict.fromkeys(inside)])
    if first["id"] == "padding.left" and (turned := _cause_at("anatomy.positions", others)):
        cause = f"{turned}; so with padding on the left: {own}"  # true rotations do not mind where a text begins
    return Story({**first, "counterexample": {**case, "influence": picture, "cause": cause}}, others)


def _cause_at(id_: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Return the cause that the failure of one property names, or ""."""
    return next((cause_of(r) for r in found if r["id"] == id_), "")


def cause_of(result: Mapping[str, Any]) -> str:
    """Return the likely cause that a result names, or ""."""
    return str((result.get("counterexample") or {}).get("cause", ""))


def _family(result: Mapping[str, Any]) -> str:
    return str(result["id"]).partition(".")[0]


def fields(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is told of a failing case, a name and words each: one list for every form of a report.

    Args:
        case: a counterexample of a report.
    """
    told = [("case", words_of(case)), ("expected", case.get("expected", "")), ("got", _got(case))]
    told += [("error", error_of(case)), ("path", case.get("path", ""))]
    return [(name, words) for name, words in told if words]


def words_of(case: Mapping[str, Any]) -> str:
    """Return the choices and sizes of a case in one line; of the sizes those that could matter."""
    drawn = [f"{k}={v}" for k, v in case["choices"].items() if k != "config"]
    sizes = " ".join(w for w in case["sizes"].split() if not w.startswith(("max_len", "num_classes")))
    return " ".join([*drawn, f"({sizes})" if sizes else ""]).strip()


def _got(case: Mapping[str, Any]) -> str:
    where = f" at index {case['index']}" if case.get("index") else ""
    return f"{case['got']}{where}" if case.get("got") else ""


def error_of(case: Mapping[str, Any]) -> str:
    """Return the error and its tolerance, and in what it is counted where it is not the difference of the two numbers.

    >>> error_of({"error": 5.0, "tolerance": 0.0, "got": "7", "expected": "2"})
    '5, where the claim is exact'
    >>> error_of({"error": 10.0, "tolerance": 0.1, "got": "7", "expected": "2", "unit": "0.5, their size"})
    '10, tolerance 0.1, 100 times as much; 5 apart, counted in 0.5, their size'
    """
    error, tolerance = case.get("error"), case.get("tolerance")
    if error is None or math.isnan(error):
        return ""
    if not tolerance:
        return f"{error:.3g}, where the claim is exact"
    told = f"{error:.3g}, tolerance {tolerance:.3g}, {error / tolerance:.3g} times as much"
    apart = _apart(case)
    if not (unit := case.get("unit", "")) or (apart is not None and f"{apart:.3g}" == f"{error:.3g}"):
        return told
    return f"{told}; " + ("" if apart is None else f"{apart:.3g} apart, ") + f"counted in {unit}"


def _apart(case: Mapping[str, Any]) -> float | None:
    """Return how far the two numbers that are shown lie apart; None where they are no numbers."""
    try:
        apart = abs(float(case["got"]) - float(case["expected"]))
    except (KeyError, ValueError):
        return None
    return apart if math.isfinite(apart) else None
