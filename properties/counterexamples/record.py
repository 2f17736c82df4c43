"""From the smallest failing case to what a reader gets: numbers, likely cause, influence map, standalone script."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from typing import Any

from veriformer.properties.bench.guards import SubjectTimeoutError
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.causes.asking import last_answer_to
from veriformer.properties.counterexamples.names import FEW, SMALL
from veriformer.properties.counterexamples.program import Program
from veriformer.properties.counterexamples.recorder import Recorder
from veriformer.properties.counterexamples.script import script
from veriformer.properties.diagnosis.masks.amount import PROVEN
from veriformer.properties.diagnosis.opinions import cause_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RecordedDraws
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation
from veriformer.properties.results.records import Counterexample


def counterexample(prop: Property, case: Case, problem: Violation) -> Counterexample:
    """Describe a violation: asks its follow-up questions, and runs the case once more to record the script."""
    subject, choices = case.bench.subject, dict(case.choices)  # what explains the case may draw more
    text = json.dumps([subject.kind, subject.target or subject.name, prop.id, choices], sort_keys=True)
    sizes = "" if subject.build is None else case.sizes
    influence = last_answer_to(problem.influence)
    found = Counterexample(
        id=hashlib.sha256(text.encode()).hexdigest()[:8],
        choices=choices,
        sizes=sizes,
        headline=problem.headline,
        got=problem.got,
        expected=problem.expected,
        index=list(problem.index),
        error=problem.error,
        unit=problem.unit,
        tolerance=problem.tolerance,
        path=problem.path,
        cause=last_answer_to(lambda: cause_of(prop, case, problem)) or "",
        influence=None if influence is None else {"magnitude": influence.magnitude, "allowed": influence.allowed},
    )
    found.script = _written(prop, case.bench, found)
    return found


def with_cause(prop: Property, bench: Workbench, found: Counterexample, cause: str) -> None:
    """Put what mends a failure before what was said of it, and write its script anew."""
    found.cause = "; ".join(part for part in (cause, found.cause) if part)
    if found.script:
        found.script = _written(prop, bench, found) or found.script


_LINE = re.compile(r"\w+\.py:\d+")

_PLACE = re.compile(
    r"\.py:\d|its place in the batch|^influence from \d|^no influence from|in the forward of|sees keys that"
    r"|no bias, or one number|lost or hidden|is no rotation by|comes out [0-9.]+ times|^it begins with|^fails wherever"
    r"|or the kept keys and values themselves|what it keeps of those before, or|is not the derivative"
    r"|does not give the derivative|^right up to|^wrong (at|from)|^influence from|positions of later chunks are not"
    r"|give other numbers than by themselves|more than once, or misses|^the loss is wrong for|^what the mask hides"
    r"|^a fast path is taken"
)
"""Of what tells where, or that, something goes wrong, and not what is done there."""


def says_what_is_wrong(cause: str) -> bool:
    """Whether a cause says more than where, or that, something goes wrong."""
    return bool(cause) and (cause.endswith(PROVEN) or not _PLACE.search(cause))


def names_another_line(cause: str, repair: str) -> bool:
    """Whether a cause was proven at a line of code, and a repair changes another one."""
    proven = _LINE.findall(cause) if cause.endswith(PROVEN) else []
    return bool(proven) and not set(proven) & set(_LINE.findall(repair))


_ONE_SCREEN = 60  # lines


def _written(prop: Property, bench: Workbench, found: Counterexample) -> str:
    """Return the script with its inputs shown; where that is long, with inputs drawn again if it is shorter so."""
    scripts = []
    for small in (SMALL, FEW):
        program = _recorded(prop, bench, found.choices, small)
        text = None if program is None else last_answer_to(partial(script, prop, bench, found, program))
        scripts += [text] if text else []
        if not text or text.count("\n") <= _ONE_SCREEN:
            break
    return min(scripts, key=lambda text: text.count("\n"), default="")


def _recorded(prop: Property, bench: Workbench, choices: dict[str, Any], small: int) -> Program | None:
    """Run the case under a recorder; None if it does not end in the same way any more."""
    bench.recorder = recorder = Recorder(bench.subject, bench.device, small)
    try:
        with recorder:
            prop.check(Case(bench, RecordedDraws(choices)))
    except Violation:
        return recorder.program
    except (Exception, SubjectTimeoutError, BudgetSpent, NotSpokenOfError):
        return None  # the recorder met an operation that it cannot write down: no script, but the violation stands
    finally:
        bench.recorder = None
    return None
