"""Under which condition a property fails, found by judging more cases: what all failing ones share and no other has.

No cause, but where to look: `fails wherever T >= 5`. Told only if one size or one choice alone parts all cases.
"""

from __future__ import annotations

from typing import Any

from veriformer.properties.bench.guards import Allowance, SubjectError, SubjectTimeoutError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws, RejectedError
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, VacuousCheckError, Violation

_CASES = 40
_EACH = 5  # cases on either side at least: a condition that holds by chance parts ten cases once in a thousand
_SIZES = ("d_model", "num_heads", "num_key_value_heads", "d_head", "num_layers")
_CHOICES = {
    "B": "the batch", "T": "T", "S": "S", "H": "the number of heads", "K": "d_head",
    "real": "the number of real positions",
    "dtype": "the dtype", "side": "the side of the padding", "stream": "the side of the model",
}  # fmt: skip
"""Choices of a case that a reader knows, and what they are called."""


def condition_of(prop: Property, case: Case) -> str | None:
    """Return the one condition that parts failing cases from others, in words; None if there is none, or several.

    A property that is judged on few cases, since one of them takes long (it trains), is not judged on forty more.
    """
    if _CASES * prop.examples_factor < _EACH:
        return None
    bench = case.bench
    kept, bench.tally = bench.tally, Tally()
    try:
        return _searched(prop, bench)
    finally:
        bench.tally = kept


def _searched(prop: Property, bench: Workbench) -> str | None:
    """Judge cases drawn anew until no feature parts them. None where time ends: no words by chance."""
    allowance = Allowance(bench.settings.effort.property_seconds)
    failing: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    found: dict[str, str] = {}
    for seed in range(_CASES):
        if allowance.is_spent:
            return None
        drawn = Case(bench, RandomDraws(seed, {}))
        try:
            prop.check(drawn)
            group = others
        except Violation:
            group = failing
        except (RejectedError, NotSpokenOfError, VacuousCheckError, SubjectError):
            continue
        except (BudgetSpent, SubjectTimeoutError):
            return None
        group.append(_features(drawn))
        if failing and others:
            found = _conditions(failing, others)
            if not found:
                return None  # what does not part these does not part more of them
    if min(len(failing), len(others)) < _EACH or len(found) != 1:
        return None
    (told,) = found.values()
    return f"fails wherever {told} ({len(failing)} cases), and nowhere else ({len(others)})"


def _conditions(failing: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, str]:
    """Return every feature that alone parts two groups of cases, with how it does."""
    shared = set.intersection(*map(set, (*failing, *others)))
    told = {name: _parts(name, [f[name] for f in failing], [f[name] for f in others]) for name in sorted(shared)}
    return {name: words for name, words in told.items() if words}


def _features(case: Case) -> dict[str, Any]:
    config = case.config()
    sizes: dict[str, Any] = {name: getattr(config, name) for name in _SIZES}
    known = {_CHOICES[k]: v for k, v in case.choices.items() if k in _CHOICES and isinstance(v, int | str)}
    if known.get("the dtype") in ("float32", "float64"):
        del known["the dtype"]  # float64 shows what rounding hides in float32: that says nothing of the fault
    return sizes | known


def _parts(name: str, failing: list[Any], others: list[Any]) -> str | None:
    """Say how one feature parts two groups of cases; None if it does not."""
    if any(isinstance(v, str | bool) for v in (*failing, *others)):
        if len(set(failing)) == 1 and failing[0] not in others:
            return f"{name} is {failing[0]}"
        if len(set(others)) == 1 and others[0] not in failing:
            return f"{name} is not {others[0]}"
        return None
    if min(failing) > max(others):
        return f"{name} is {min(failing)} or more"
    if max(failing) < min(others):
        return f"{name} is {max(failing)} or less"
    for block in (2, 4, 8, 16, 32):
        if all(v % block for v in failing) and not any(v % block for v in others):
            return f"{name} is no multiple of {block}"
    return None
