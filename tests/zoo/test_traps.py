"""No property fails on a right implementation that looks wrong; undeclared, what fails says what to declare."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import NOT_APPLICABLE, OPEN, PASS, Result
from veriformer.properties.subject.facts import FACTS
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import Trap, all_traps

TRAPS = all_traps()
QUICK = Settings(profile="quick")
UNKNOWN = object()
MOST_QUESTIONS = {"T39-int8": 3}  # its rounding hides what reaches what, its scale runs over the batch


@pytest.fixture(scope="module", params=TRAPS.values(), ids=list(TRAPS))
def right(request: pytest.FixtureRequest) -> Trap:
    """Return each trap; its tests stand together."""
    trap: Trap = request.param
    return trap


@dataclass
class Judged:
    """A trap with its honest declarations.

    Attributes:
        judge: of it.
        asked: by the id of each property that was judged, the facts that were asked for.
    """

    judge: Judge
    asked: dict[str, set[str]] = field(default_factory=dict)

    def says_the_same_of(self, other: Subject, prop: Property) -> bool:
        """Whether a property sees no difference: a judgement follows from models, seed and the facts asked for."""
        mine = self.judge.resolved
        same = (mine.fact(name, UNKNOWN) == other.fact(name, UNKNOWN) for name in self.asked.get(prop.id, ()))
        return prop.id in self.asked and all(same)


@pytest.fixture(scope="module")
def declared(right: Trap) -> Judged:
    return Judged(Judge(right.subject(), QUICK))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of all facts that are asked for during the test."""
    names: set[str] = set()
    fact = Subject.fact
    monkeypatch.setattr(Subject, "fact", lambda self, name, *default: names.add(name) or fact(self, name, *default))
    return names


def failures(results: list[Result]) -> list[str]:
    return [f"{r.id}: {r.outcome} {r.reason}" for r in results if r.outcome not in (PASS, NOT_APPLICABLE)]


@pytest.mark.usefixtures("brief")
def test_trap_passes(right: Trap, declared: Judged, asked: set[str]) -> None:
    results = []
    for prop in select():
        asked.clear()
        results.append(declared.judge.judge(prop))
        declared.asked[prop.id] = set(asked)
    wrong = failures(results)
    assert not wrong, f"{right.title}\n" + "\n".join(wrong)
    assert any(r.outcome == PASS for r in results)


@pytest.mark.usefixtures("brief")
def test_a_trap_without_declarations_is_explained(right: Trap, declared: Judged) -> None:
    subject = declared.judge.subject
    judge = Judge(replace(subject, declares={}), QUICK, twin=declared.judge)
    core = [prop for prop in select(level="core") if subject.kind in prop.kinds]
    results = [judge.judge(prop) for prop in core if not declared.says_the_same_of(judge.resolved, prop)]
    causes = [r.counterexample.cause for r in results if r.counterexample]
    told = [fact for fact in FACTS for cause in causes if "declare" in cause and f"{fact}" in cause]
    failed = failures([r for r in results if r.outcome != OPEN])
    assert not failed or set(told) & set(subject.declares), "\n".join([*failed, *causes])
    asked = {r.declare for r in results if r.outcome == OPEN}
    assert len(asked) <= MOST_QUESTIONS.get(right.id, 2), "\n".join(asked)


def test_every_trap_of_the_list_is_here() -> None:
    known = {trap.split("-")[0] for trap in TRAPS}
    assert {f"T{number:02d}" for number in range(1, 41)} <= known
