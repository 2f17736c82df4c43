"""`parametrize`: one pytest test for each property, in two lines of a user's own test file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.extending import load_installed
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.known.applying import apply_deviations
from veriformer.properties.known.deviations import Deviations, read_deviations
from veriformer.properties.pytest_plugin import conclude
from veriformer.properties.results.records import Report, Result, SubjectReport
from veriformer.properties.targets import at_home


def parametrize(
    thing: Any,
    *,
    kind: str | None = None,
    profile: str = "standard",
    seed: int = 0,
    deviations: str | Path | None = None,
    **declares: Any,
) -> Any:
    """Return a test function that pytest runs once for each property that speaks of the subject's kind.

    Each test is marked with the level and the family of its property: `pytest -m "causality and not extended"`.

    Args:
        thing: what to judge, or a list of it; see `veriformer.properties.adapters.recognising.as_subject`.
        kind: of a plain function or an unknown module.
        profile: "quick", "standard" or "thorough".
        seed: of every random choice.
        deviations: TOML file of known deviations: what it declares is expected to fail, and must.
        declares: facts, e.g. `causal=True`.

    In a test file:

        from veriformer.properties import parametrize
        test_my_model = parametrize(MyModel, causal=True)
    """
    load_installed()
    several = isinstance(thing, list | tuple)
    subjects = [as_subject(one, kind=kind, **declares) for one in (thing if several else [thing])]
    rows = [
        pytest.param(
            judge, p, id=f"{judge.subject.name}-{p.id}" if several else p.id,
            marks=[getattr(pytest.mark, name) for name in (p.level, p.family)],
        )
        for judge in [Judge(subject, Settings(profile=profile, seed=seed)) for subject in subjects]
        for p in select()
        if judge.subject.kind in p.kinds
    ]  # fmt: skip
    known = read_deviations(None if deviations is None else Path(deviations))
    known.must_name(p.id for p in select())

    @pytest.mark.parametrize(("judge", "prop"), rows)
    def test(judge: Judge, prop: Property) -> None:
        settle(judge, prop, known)

    return test


def settle(judge: Judge, prop: Property, known: Deviations | None = None) -> None:
    """Judge one property and end the test accordingly.

    What a property requires is judged first if it was not yet, so that tests may run alone and in any order. A
    deviation that is declared passes as an expected failure; a property that does not apply is skipped with its reason.
    """
    with at_home(judge.subject.target):
        result = judged_with_requirements(judge, prop, known)
    conclude(result, prop.statement, judge.subject.name)


def judged_with_requirements(judge: Judge, prop: Property, known: Deviations | None = None) -> Result:
    """Return the result of a property, known deviations applied (None: the shipped ones)."""
    needed = [p for p in select(only=prop.requires) if p.id not in judge.known] if prop.requires else []
    subject = judge.subject
    part = SubjectReport(subject.name, subject.kind, subject.target, results=[judge.judge(p) for p in needed])
    part.results += [Result(i, "core", outcome) for i, outcome in judge.known.items() if i in prop.requires]
    part.results.append(result := judge.judge(prop))
    judge.explain([result], [prop])
    settings = judge.settings
    report = Report([part], settings.seed, settings.profile, settings.device)
    apply_deviations(report, known or read_deviations(None))
    return result
