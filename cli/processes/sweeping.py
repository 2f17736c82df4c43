"""One target judged for a sweep: called in a process of its own, gives plain data."""

from __future__ import annotations

import time
from typing import Any

NOT_JUDGED = ("ERROR", "BLOCKED", "NOT_APPLICABLE")
"""Outcomes that say nothing of a subject."""


def modules_of(library: str) -> tuple[str, ...]:
    """Return the modules that every process of a library's subjects needs."""
    from veriformer.properties.adapters.libraries import LIBRARIES

    found = LIBRARIES[library]
    return (*found.modules, *found.imports, "torch._dynamo")  # which every copy would import for itself


def judge_target(target: str, level: str, profile: str, seed: int) -> dict[str, Any]:
    """Load one target and judge it by the catalogue.

    Returns:
        `{"subject": record, "error": ""}`; the record is None, and the error one sentence, if it cannot be built.
    """
    from veriformer.properties.adapters.target import TargetError
    from veriformer.properties.bench.isolation import kept_flags
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.catalogue import select
    from veriformer.properties.judging.run import judge_subject
    from veriformer.properties.results.clocks import PULSE
    from veriformer.properties.results.records import plain
    from veriformer.properties.targets import load

    started = time.perf_counter()
    with kept_flags():
        before = PULSE.begin(0)  # the asking side limits it as a whole
        try:
            (subject,) = load(target)
        except TargetError as problem:
            return {"subject": None, "error": str(problem)}
        finally:
            PULSE.end(before)
        part = judge_subject(subject, select(level=level), Settings(profile=profile, seed=seed))
    return row_of({**plain(part), "seconds": round(time.perf_counter() - started, 3)})


def row_of(subject: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a subject that was judged; one of which nothing could be judged has the reason alone."""
    results = subject["results"]
    if any(result["outcome"] not in NOT_JUDGED for result in results):
        return {"subject": subject, "error": ""}
    reasons = [result["reason"] for result in results if result["outcome"] == "ERROR"]
    return {"subject": None, "error": reasons[0] if reasons else "no property applies"}


def judge_canaries(kinds: list[str], level: str, profile: str, seed: int) -> dict[str, Any]:
    """Send the known-broken models of these kinds through the engine."""
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.canaries import send
    from veriformer.properties.judging.catalogue import select

    return send(kinds, select(level=level), Settings(profile=profile, seed=seed))


def names_of(library: str) -> dict[str, Any]:
    """Return the names of all subjects of a library, its releases, and why there are none."""
    from veriformer.properties.adapters.libraries import LIBRARIES
    from veriformer.properties.adapters.recognising import MissingLibraryError, shipped

    try:
        names = list(shipped(library))
    except MissingLibraryError as problem:
        return {"names": [], "versions": {}, "error": str(problem)}
    except Exception as problem:  # the library is installed and broken
        return {
            "names": [],
            "versions": {},
            "error": f"{library}: importing it raised {type(problem).__name__}: {problem}",
        }
    return {"names": names, "versions": LIBRARIES[library].versions(), "error": ""}
