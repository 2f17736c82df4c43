"""A whole run in this process: canaries first, then every subject by every property."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from veriformer.properties.bench.isolation import kept_generators
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.searching.planning import Plan
from veriformer.properties.judging.canaries import send
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import Report, Result, SubjectReport, believed, plain, reach_of, unreached_of
from veriformer.properties.subject.claims import claims_of
from veriformer.properties.subject.subject import Subject

OnResult = Callable[[Subject, Result], None]
OnPlan = Callable[[Plan], None]


def run(
    subjects: Sequence[Subject],
    properties: Sequence[Property],
    settings: Settings,
    on_result: OnResult | None = None,
    on_plan: OnPlan | None = None,
) -> Report:
    """Judge every subject by every property, in this process.

    Args:
        subjects: what to judge.
        properties: in dependency order.
        settings: of the run.
        on_result: called after each result, for progress.
        on_plan: called with the plan of each large instance, before it is judged.
    """
    started = time.perf_counter()
    report = Report([], settings.seed, settings.profile, settings.device)
    report.properties = {p.id: p.told for p in properties}
    with kept_generators():
        report.canaries = send((s.kind for s in subjects), properties, settings)
        report.subjects += [judge_subject(subject, properties, settings, on_result, on_plan) for subject in subjects]
    report.seconds = time.perf_counter() - started
    return report


def judge_subject(
    subject: Subject,
    properties: Sequence[Property],
    settings: Settings,
    on_result: OnResult | None = None,
    on_plan: OnPlan | None = None,
) -> SubjectReport:
    """Judge one subject by every property, in this process, and put faults into it; see `run`."""
    part = SubjectReport(subject.name, subject.kind, subject.target, dict(subject.declares))
    judge = Judge(subject, settings)
    if plan := judge.plan(properties):
        part.plan = plan.told
        if on_plan is not None:
            on_plan(plan)
    for prop in properties:
        part.results.append(result := judge.judge(prop))
        if on_result is not None:
            on_result(subject, result)
    if judge.device_is_lost:  # by the subject, or by us; the results say so, and nothing can be called any more
        part.probed = judge.probed
        return part
    judge.reconsider_all(part.results, properties)
    judge.explain(part.results, properties)
    part.probed = judge.probed
    part.believed = believed(subject.declares, judge.verified)
    part.reach, part.unreached = reach_of(part.results), unreached_of(part.results)
    part.claims = claims_of(subject)
    part.anatomy = plain(judge.anatomy())
    part.power = judge.prove_power(properties)
    part.never_walked = judge.never_walked(path for result in part.results for path in result.paths)
    return part
