"""`check`: judge a subject in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.extending import load_installed
from veriformer.properties.judging.catalogue import select
from veriformer.properties.judging.garbage import collecting_seldom
from veriformer.properties.judging.run import run
from veriformer.properties.judging.showing import progress
from veriformer.properties.known.applying import apply_deviations
from veriformer.properties.known.deviations import read_deviations
from veriformer.properties.results.records import Report
from veriformer.properties.targets import at_home


def check(
    thing: Any,
    *,
    kind: str | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    level: str = "all",
    profile: str = "standard",
    seed: int = 0,
    device: str | None = None,
    deviations: str | Path | None = None,
    **declares: Any,
) -> Report:
    """Judge a Subject, a module class or instance, or a function. Never raises for a violation.

    On a terminal a bar on standard error shows how far it is, after a sentence on what is planned for a large instance.

    Args:
        thing: what to judge; see `veriformer.properties.adapters.recognising.as_subject`.
        kind: of a plain function or an unknown module.
        only: ids or families of properties; empty for all.
        exclude: ids or families to leave out.
        level: "core" or "all".
        profile: "quick", "standard" or "thorough".
        seed: of every random choice.
        device: torch device; None: that of a model that was given, or the CPU.
        deviations: TOML file of known deviations.
        declares: facts, e.g. `causal=True`.

    Returns:
        The report: `report.ok`, `report.results`, `report.raise_for_violations()`.

    Raises:
        TypeError: the thing is not recognised.
        ValueError: a kind, fact or profile does not exist.
        KeyError: a property does not exist.
        DeviationsError: the deviations file cannot be relied on.
        PluginError: a plug-in that is installed cannot be taken.
    """
    load_installed()
    subject = as_subject(thing, kind=kind, **declares)
    known = read_deviations(None if deviations is None else Path(deviations))
    settings = Settings(profile=profile, seed=seed, device=device or subject.device, named=tuple(only))
    properties = select(only, exclude, level)
    with at_home(subject.target), collecting_seldom(), progress(len(properties)) as (on_result, on_plan):
        report = run([subject], properties, settings, on_result, on_plan)
    apply_deviations(report, known)
    return report
