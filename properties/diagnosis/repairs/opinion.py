"""Which slip of the subject's code explains a failure: with it undone the property holds, and no other is broken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from veriformer.properties.bench.guards import Allowance, SubjectError, SubjectTimeoutError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.causes.tracing.lines import text_of
from veriformer.properties.diagnosis.repairs.mending import Mended, Site, sites_of
from veriformer.properties.diagnosis.repairs.slips import Slip
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws, RecordedDraws, RejectedError
from veriformer.properties.engine.property import Property, registered
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, VacuousCheckError, Violation

_MOST = 250
"""Lines times slips that are tried: a few seconds on a small model."""
_MORE = 10
"""Cases drawn anew under which what mends the one that failed must hold too."""
_FEWEST = 3
_LINES = 2
"""Lines that may be named together: where two must agree, either may be the one that is wrong."""
_SEARCHES = 2
"""Searches for one subject: what mends one failure is tried first on the next."""
_GUARDS = (
    "numerics.finite", "attention.", "causality.", "padding.", "batch.", "permutation.", "positions.", "anatomy.",
    "residual.", "decoding.cache", "layer.", "rotary.", "norm.", "ffn.", "embedding.", "parameters.all-used",
)  # fmt: skip
"""Properties that held before and must hold still: a line that makes all outputs one mends much, and breaks these."""

_MENDED = (
    *_GUARDS, "alibi.", "cross_attention.", "decoding.", "learned.", "loss.", "position-bias.", "sinusoidal.",
    "softmax.", "t5.",
)  # fmt: skip
"""Properties of which a slip of a forward, or of `build`, may be what breaks them."""
_DIFFERENCES = ("causality.declared-bidirectional-is", "padding.mask-matters", "positions.order-matters")
"""Properties that want a difference: whatever moves the output would do."""
_TIMES = 3
"""Of the time of a property: a search that is not over by then says nothing, for another slip may do as well."""
_KNOWN = ("tolerance", "floor", "first floor")

Repair = tuple[Site, Slip]


def repair_of(prop: Property, case: Case, *, searches: bool = True) -> str | None:
    """Say which slip, undone, mends a failure, where this is so on one line alone, or on two.

    Args:
        prop: what failed.
        case: the smallest failing one.
        searches: whether a slip is looked for that mended no other failure of the subject.
    """
    bench = case.bench
    if bench.pool.is_large or not prop.id.startswith(_MENDED) or prop.id in _DIFFERENCES:
        return None
    known: list[list[Repair]] = bench.measured.setdefault(("repairs",), [])
    made = _comparisons(prop, case)
    for found in known:
        if found and all(_holds(prop, case, repair, made) for repair in found):
            return _told(found)
    if len(known) >= _SEARCHES or not searches:
        return None
    known.append([])
    known[-1] = _searched(prop, case, made)
    return _told(known[-1]) if known[-1] else None


def _comparisons(prop: Property, case: Case) -> int:
    """Return how many comparisons the failing case makes, the one that fails among them."""
    again = Case(_anew(case.bench), RecordedDraws(case.choices))
    _judge(prop, again)
    return again.bench.tally.comparisons


def _searched(prop: Property, case: Case, made: int) -> list[Repair]:
    allowance = Allowance(_TIMES * case.bench.settings.effort.property_seconds)
    mends = []
    for repair in islice(_candidates(prop, case), _MOST):
        if allowance.is_spent:
            return []  # not all were tried: another may do as well
        if _holds(prop, case, repair, made):
            mends.append(repair)
    others = _Others(prop, case)
    found = [r for r in mends if _holds_elsewhere(prop, case, r) and others.hold_with(r)]
    return found if len({(site.file, site.number) for site, _ in found}) <= _LINES else []


def _told(found: list[Repair]) -> str:
    lines: dict[tuple[str, int], list[str]] = {}
    for site, slip in found:
        lines.setdefault((site.file, site.number), []).append(slip.told)
    parts = [
        f"{' or '.join(told[:2])} at {Path(file).name}:{number}: `{text_of(file, number)}`"
        for (file, number), told in lines.items()
    ]
    return f"one change makes it right: {'; or '.join(parts)}"


def _candidates(prop: Property, case: Case) -> Iterator[Repair]:
    """Yield what may be undone, in the order of the calls: in `build`, and in a forward."""
    found = sites_of(lambda: _judge(prop, Case(_anew(case.bench), RecordedDraws(case.choices))))
    yield from ((site, slip) for site, slips in found.items() for slip in slips)


def _anew(bench: Workbench) -> Workbench:
    """Return the subject on a workbench of its own: its models are built anew; what rounding does to them is known."""
    other = Workbench(bench.subject, bench.settings)
    other.measured = {key: value for key, value in bench.measured.items() if key[0] in _KNOWN}
    return other


def _holds(prop: Property, case: Case, repair: Repair, made: int) -> bool:
    """Whether the case that failed holds with a slip undone, after as many comparisons: not for want of an output."""
    again = Case(_anew(case.bench), RecordedDraws(case.choices))
    with Mended(*repair):
        return _judge(prop, again) is True and again.bench.tally.comparisons >= made


def _holds_elsewhere(prop: Property, case: Case, repair: Repair) -> bool:
    """Whether cases drawn anew hold too."""
    bench = _anew(case.bench)
    with Mended(*repair):
        outcomes = [_judge(prop, Case(bench, RandomDraws(seed, {}))) for seed in range(_MORE)]
    return False not in outcomes and outcomes.count(True) >= _FEWEST


class _Others:
    """What other properties say of the subject as it is, each on one case."""

    def __init__(self, prop: Property, case: Case) -> None:
        self.bench = case.bench
        self.properties = [
            p
            for name, p in registered().items()
            if p is not prop and name.startswith(_GUARDS) and not p.costly and not p.why_not(case.subject)
        ]
        self._before: list[bool | None] | None = None

    def hold_with(self, repair: Repair) -> bool:
        """Whether all that held holds with a slip undone."""
        if self._before is None:
            bench = _anew(self.bench)
            self._before = [_judge(p, Case(bench, RandomDraws(0, {}))) for p in self.properties]
        bench = _anew(self.bench)
        with Mended(*repair):
            return all(
                _judge(p, Case(bench, RandomDraws(0, {}))) is not False
                for p, held in zip(self.properties, self._before, strict=True)
                if held
            )


def _judge(prop: Property, case: Case) -> bool | None:
    """Judge a case: whether it holds; None where it speaks of nothing."""
    case.bench.tally = Tally()
    try:
        prop.check(case)
    except (RejectedError, NotSpokenOfError):
        return None
    except (Violation, VacuousCheckError, SubjectError, SubjectTimeoutError, BudgetSpent, RuntimeError):
        return False
    return True
