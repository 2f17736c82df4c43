"""One mutant judged by the catalogue, through the same engine as a user's model: a row of the kill matrix."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # several mutants share the cores
    os.environ.setdefault(_variable, "1")

import torch  # noqa: E402

from veriformer.properties.bench.profiles import Settings  # noqa: E402
from veriformer.properties.engine.property import Property  # noqa: E402
from veriformer.properties.judging.catalogue import named, select  # noqa: E402
from veriformer.properties.judging.judge import Judge  # noqa: E402
from veriformer.properties.results import records as r  # noqa: E402
from veriformer.properties.subject.subject import Subject  # noqa: E402
from veriformer.tests.mutants import Fault, all_faults  # noqa: E402
from veriformer.tests.mutants.source import SourceMutant, all_source_mutants  # noqa: E402

NOTICED = (r.FAIL, r.OPEN, r.ERROR, r.TIMEOUT)
"""Outcomes by which a mutant is noticed; only FAIL, or OPEN, is a kill by a property, the others are a breakdown."""


def judge_fault(fault_id: str, profile: str, seed: int) -> dict[str, Any]:
    """Judge one fault of the zoo by the whole catalogue.

    Returns:
        Its row: what it is, `killed_by`, examples and seconds to the first kill, causes named, `located`.
    """
    torch.set_num_threads(1)
    fault = all_faults()[fault_id]
    costly = tuple(p.id for p in named(fault.killed_by) if p.costly)  # asked for by name, as a user would
    seen = _judged([fault.subject()], select(), Settings(profile=profile, seed=seed, named=costly))
    told = {x.id: (x.counterexample.headline, x.counterexample.cause) for x in seen["results"] if x.counterexample}
    return {
        "id": fault.id,
        "origin": "documented" if fault.bug else "systematic",
        "bug": fault.bug.id if fault.bug else None,
        "title": fault.title,
        "citation": fault.citation,
        "preconditions": fault.bug.preconditions if fault.bug else "",
        "expected": list(fault.killed_by),
        **_row(seen),
        "causes": {prop: cause for prop, (_, cause) in told.items() if cause},
        "headlines": {prop: headline for prop, (headline, _) in told.items()},
        "located": _located(fault, list(told.values())) if seen["killed"] else "",
    }


def judge_source(mutant_id: str, profile: str, seed: int) -> dict[str, Any]:
    """Judge one mutant of the reference's source, up to the first property that notices it.

    To be called in a process of its own: the reference that is imported from then on is the broken one.
    """
    torch.set_num_threads(1)
    mutant = all_source_mutants()[mutant_id]
    properties = select()  # the families, and the formulas in them, are those of the right reference
    try:
        subjects = mutant.load()
    except Exception as problem:  # the module itself breaks down
        told = {"import": f"{type(problem).__name__}: {problem}"[:200]}
        broken = {"killed_by": [], "errors": told, "examples": {}, "seconds": 0.0, "first_kill": None}
        return {**_described(mutant), **broken}
    seen = _judged(subjects, properties, Settings(profile=profile, seed=seed), first=True)
    return {**_described(mutant), **_row(seen)}


def _described(mutant: SourceMutant) -> dict[str, Any]:
    return {"id": mutant.id, "origin": "source", "bug": None, "title": mutant.title, "equivalent": mutant.equivalent}


def _judged(
    subjects: Iterable[Subject], properties: list[Property], settings: Settings, *, first: bool = False
) -> dict[str, Any]:
    started = time.perf_counter()
    results: list[r.Result] = []
    kill: dict[str, Any] | None = None
    for subject in subjects:
        judge = Judge(subject, settings)
        for prop in properties:
            result = judge.judge(prop)
            results.append(result)
            if kill is None and result.outcome in NOTICED:
                kill = {
                    "property": prop.id,
                    "subject": subject.name,
                    "outcome": result.outcome,
                    "seconds": round(time.perf_counter() - started, 3),
                    "examples": max(1, result.examples),
                }
            if first and kill is not None:
                break
        if first and kill is not None:
            break
    return {
        "results": results,
        "kill": kill,
        "killed": [x.id for x in results if x.outcome in (r.FAIL, r.OPEN)],
        "seconds": time.perf_counter() - started,
    }


def _row(seen: dict[str, Any]) -> dict[str, Any]:
    return {
        "killed_by": list(dict.fromkeys(seen["killed"])),
        "blocked": [x.id for x in seen["results"] if x.outcome == r.BLOCKED],
        "errors": {x.id: x.reason[:200] for x in seen["results"] if x.outcome in (r.ERROR, r.TIMEOUT)},
        "examples": {x.id: max(1, x.examples) for x in seen["results"] if x.outcome in (r.FAIL, r.OPEN)},
        "seconds": round(seen["seconds"], 3),
        "first_kill": seen["kill"],
    }


def _located(fault: Fault, told: list[tuple[str, str]]) -> str:
    """Score what a reader is told, from headlines and causes in the order in which they are printed.

    The first likely cause that is named must be the right one. Where none is named, a headline may say what is broken;
    else the failures are silent about it.
    """
    causes = [cause for _, cause in told if cause]
    if causes:
        return "right" if fault.names(causes[0]) else "wrong"
    return "right" if any(fault.names(headline) for headline, _ in told) else "silent"
