"""Loading what a command names: each target in a process of its own, so that one that fails costs its row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from veriformer.cli.processes.asking import Judges, Lost, RefusedError, Task
from veriformer.cli.processes.printed import Printed
from veriformer.cli.processes.wire import NoAnswerError
from veriformer.properties.results.records import SubjectReport, plain
from veriformer.reports.schema import is_subject

SECONDS = 120.0
"""For importing a target and making its subjects; seconds that count."""


@dataclass
class Loaded:
    """What came of one target.

    Attributes:
        target: as it was given.
        subjects: described in plain words; none if it could not be loaded.
        why: it could not, and the outcome of its row; None if it was.
        printed: while it was loaded.
        chosen: what of a file was chosen, where it was named alone.
    """

    target: str
    subjects: list[dict[str, Any]] = field(default_factory=list)
    why: Lost | None = None
    printed: Printed = field(default_factory=Printed)
    chosen: str = ""


def load_all(pool: Judges, targets: Sequence[str], props: Sequence[str] = ()) -> tuple[list[Loaded], dict[str, str]]:
    """Load every target; return what came of each, and the releases of the libraries that they name.

    Args:
        pool: who loads.
        targets: as they were given.
        props: ids of the properties that large instances are to be planned for.

    Raises:
        RefusedError: one is no target, or none of them could be loaded.
    """
    found, versions = load_each(pool, targets, props)
    if not any(one.subjects for one in found):
        raise RefusedError("\n".join(one.why.why for one in found if one.why), is_usage=False)
    return found, versions


def load_each(pool: Judges, targets: Sequence[str], props: Sequence[str] = ()) -> tuple[list[Loaded], dict[str, str]]:
    """Load every target as `load_all` does; it is no error if none of them could be loaded.

    Raises:
        RefusedError: one is no target.
    """
    found = [Loaded(target) for target in dict.fromkeys(targets)]
    versions: dict[str, str] = {}
    pool.run([_task(one, versions, props) for one in found])
    for one in found:
        if one.why is not None and one.why.is_usage:
            raise RefusedError(one.why.why)
    return found, versions


def _is_described(subject: dict[str, Any]) -> bool:
    """Whether this is what describes a subject."""
    name, kind, target, plan = (subject[key] for key in ("name", "kind", "target", "plan"))
    part = plain(SubjectReport(name, kind, target, subject["facts"]))
    return (
        isinstance(target, str)
        and is_subject({**part, "claims": subject["claims"], "plan": plan["told"] if plan else ""})
        and (plan is None or (isinstance(plan["sentence"], str) and isinstance(plan["property_seconds"], float | int)))
    )


def _task(one: Loaded, versions: dict[str, str], props: Sequence[str]) -> Task:
    def done(answer: dict[str, Any]) -> None:
        if not all(map(_is_described, answer["subjects"])) or not isinstance(answer["chosen"], str):
            raise NoAnswerError
        versions.update({str(name): str(release) for name, release in answer["versions"].items()})
        one.subjects, one.chosen = answer["subjects"], answer["chosen"]

    def lost(why: Lost) -> None:
        late = why.outcome == "TIMEOUT"
        named = f"{one.target}: importing it took longer than {SECONDS:g} s" if late else why.why
        one.why = Lost(named if late or one.target.partition(":")[0] in named else f"{one.target}: {named}",
                       why.outcome, why.is_usage)  # fmt: skip

    asked = {"target": one.target, "props": list(props)}
    return Task("load", lambda: asked, done, lost, seconds=SECONDS, home=one.target,
                told=one.printed, doing="it was loaded")  # fmt: skip
