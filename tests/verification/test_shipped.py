"""Every property on every shipped subject that it speaks of, one test each; and faults put into each subject, one test.

`-k` takes words of the library, the subject and the property: `-k causality`, `-k "reference and decoder"`,
`-k "torch and MultiheadAttention and padding"`, `-k test_power`. `-m` takes the level, the family, or all of this:
`-m core`, `-m "causality and not extended"`, `-m verification`. VERIFORMER_PROFILE=standard looks further than quick.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from verification.counting import LEFT, PROFILE
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.canaries import send
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.known.deviations import read_deviations
from veriformer.properties.parametrizing import judged_with_requirements
from veriformer.properties.pytest_plugin import conclude
from veriformer.properties.subject.subject import Subject

LIBRARIES = ("reference", "torch")
PROPERTIES = select()
KNOWN = read_deviations(None)
SETTINGS = Settings(profile=PROFILE)
SUBJECTS = {
    f"{library}-{name}": replace(subject, target=f"{library}:{name}")
    for library in LIBRARIES
    for name, subject in shipped(library).items()
}
ROWS = [
    pytest.param(
        subject, prop, id=f"{label}-{prop.id}", marks=[getattr(pytest.mark, m) for m in (prop.level, prop.family)]
    )
    for label, subject in SUBJECTS.items()
    for prop in PROPERTIES
    if subject.kind in prop.kinds
]
pytestmark = pytest.mark.verification

Record = Callable[[str, Any], None]


@functools.lru_cache(maxsize=1)
def judge_of(target: str) -> Judge:
    """Return the judge of a subject; the models of the one before are dropped."""
    (subject,) = (s for s in SUBJECTS.values() if s.target == target)
    return Judge(subject, SETTINGS)


@functools.cache
def canaries_of(kind: str) -> dict[str, Any]:
    """Send the known-broken models of a kind, before a worker judges the first subject of it."""
    return send([kind], PROPERTIES, SETTINGS)


@pytest.fixture
def judge(subject: Subject, record_property: Record) -> Judge:
    found = canaries_of(subject.kind)
    record_property("canaries", [subject.kind, found["caught"], found["sent"]])
    if found["missed"]:
        pytest.fail(f"canary missed, nothing that is said of a {subject.kind} counts: {found['missed']}", pytrace=False)
    return judge_of(subject.target)


@pytest.mark.parametrize(("subject", "prop"), ROWS)
def test_holds(judge: Judge, prop: Property, record_property: Record) -> None:
    result = judged_with_requirements(judge, prop, KNOWN)
    left = prop.costly and PROFILE != "thorough"
    record_property("verified", [judge.subject.target, LEFT if left else result.outcome])
    conclude(result, prop.statement, judge.subject.name)


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_power(judge: Judge, record_property: Record) -> None:
    power = judge.prove_power(PROPERTIES) or {"noticed": 0, "tried": 0, "missed": []}
    record_property("power", [power["noticed"], power["tried"]])
    if not power["tried"]:
        pytest.skip("no fault fits")
    assert not power["missed"], "faults put into the subject that no property noticed"
