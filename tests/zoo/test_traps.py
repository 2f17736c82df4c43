"""No property fails on a right implementation that looks wrong; undeclared, what fails says what to declare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.run import run
from veriformer.properties.subject.facts import FACTS
from veriformer.tests.traps import Trap, all_traps

TRAPS = all_traps()


@pytest.mark.parametrize("right", TRAPS.values(), ids=list(TRAPS))
def test_trap_passes(right: Trap) -> None:
    report = run([right.subject()], select(), Settings(profile="quick"))
    wrong = [f"{r.id}: {r.outcome} {r.reason}" for r in report.results if r.outcome not in ("PASS", "NOT_APPLICABLE")]
    assert not wrong, f"{right.title}\n" + "\n".join(wrong)
    assert report.ok


@pytest.mark.parametrize("right", TRAPS.values(), ids=list(TRAPS))
def test_a_trap_without_declarations_is_explained(right: Trap) -> None:
    subject = right.subject()
    report = run([replace(subject, declares={})], select(level="core"), Settings(profile="quick"))
    failed = [f"{r.id}: {r.outcome} {r.reason}" for r in report.results if r.outcome not in ("PASS", "NOT_APPLICABLE")]
    causes = [r.counterexample.cause for r in report.results if r.counterexample]
    told = [fact for fact in FACTS for cause in causes if "declare" in cause and f"{fact}" in cause]
    assert not failed or set(told) & set(subject.declares), "\n".join([*failed, *causes])


def test_every_trap_of_the_list_is_here() -> None:
    known = {trap.split("-")[0] for trap in TRAPS}
    assert {f"T{number:02d}" for number in range(1, 41)} <= known
