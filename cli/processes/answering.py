"""The other side of `asking`: a process that judges. What hangs, crashes or eats memory there costs one result."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from veriformer.cli.processes.limits import limit_memory
from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.adapters.target import LIBRARY, Target, TargetError
from veriformer.properties.bench.isolation import is_lost
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.canaries import send
from veriformer.properties.judging.catalogue import catalogue, select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.reading import result_of
from veriformer.properties.results.records import plain
from veriformer.properties.targets import at_home, load

Message = tuple[str, dict[str, Any]]


def serve(connection: Connection, settings: dict[str, Any], memory_gib: float) -> None:
    """Answer requests until the connection closes.

    Args:
        connection: receives `(question, arguments)`, sends `("ok", answer, is_spent)` or `("refused", sentence,
            is_spent)`; a process that is spent can answer nothing more.
        settings: fields of `Settings`, dtypes as names.
        memory_gib: limit of the address space on the CPU; 0 for none.
    """
    sys.stdout = sys.stderr  # what a subject prints must not mix with a report on standard output
    torch.set_num_threads(1)
    limit_memory(memory_gib if settings["device"] == "cpu" else 0)
    answers = Answers(settings)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            question, arguments = connection.recv()
            connection.send((*answers.answer(question, arguments), answers.is_spent))


class Answers:
    """Subjects that were loaded, and the judge of each."""

    def __init__(self, settings: dict[str, Any]) -> None:
        dtypes = tuple(getattr(torch, name) for name in settings.get("dtypes", ()))
        self.settings = Settings(**{**settings, "dtypes": dtypes})
        self._judges: dict[str, Judge] = {}

    def answer(self, question: str, arguments: dict[str, Any]) -> Message:
        """Return `("ok", answer)` or `("refused", {"why": sentence})`."""
        try:
            return "ok", getattr(self, question)(**arguments)
        except TargetError as problem:
            return "refused", {"why": str(problem), "is_usage": problem.is_usage}
        except (KeyError, ValueError) as problem:
            return "refused", {"why": str(problem.args[0]) if problem.args else str(problem)}
        except Exception as problem:  # a worker that dies takes the reason with it
            return "refused", {
                "why": f"veriformer itself failed: {type(problem).__name__}: {problem} (please report this)"
            }

    @property
    def is_spent(self) -> bool:
        """Whether nothing more can be judged by this process: an assertion failed on the GPU."""
        return is_lost(torch.device(self.settings.device))

    def plan(self, targets: Sequence[str], only: Sequence[str], exclude: Sequence[str], level: str) -> dict[str, Any]:
        """Load targets and select properties; both described in plain words."""
        if self.settings.device.startswith("cuda") and not torch.cuda.is_available():
            device = self.settings.device
            raise ValueError(
                f"device was {device!r} and this machine has no CUDA that torch can use; leave --device out"
            )
        properties = select(only, exclude, level)
        subjects = [s for target in targets for s in load(target)]
        return {
            "subjects": [
                {"name": s.name, "kind": s.kind, "target": s.target, "facts": plain(dict(s.declares))} for s in subjects
            ],
            "properties": [_described(p) for p in properties],
            "catalogue": len(catalogue()),
            "versions": _releases(targets),
        }

    def describe(self) -> dict[str, Any]:
        """Describe the whole catalogue."""
        return {"properties": [_described(p) for p in catalogue().values()]}

    def judge(self, target: str, prop: str, known: dict[str, str]) -> dict[str, Any]:
        """Judge one property of one subject; `known` are outcomes found by other workers."""
        judge = self._judge(target)
        for prop_id, outcome in known.items():
            judge.learn(prop_id, outcome)
        with at_home(target):
            result = judge.judge(catalogue()[prop])
        return {"result": plain(result), "probed": judge.probed, "verified": sorted(judge.verified)}

    def canaries(self, kinds: Sequence[str], props: Sequence[str]) -> dict[str, Any]:
        """Send known-broken models of these kinds through the engine."""
        return send(kinds, [catalogue()[p] for p in props], self.settings)

    def power(
        self, target: str, props: Sequence[str], walked: Sequence[str], troubled: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Put faults into a subject, to be noticed by these properties; and tell which paths were never walked.

        Of its failures and questions, `troubled`, found by several workers, those failures are given back that turn
        out to be questions.
        """
        judge = self._judge(target)
        results = [result_of(record) for record in troubled]
        with at_home(target):
            return {
                "reconsidered": plain(judge.reconsider_all(results, [catalogue()[r.id] for r in results])),
                "power": judge.prove_power([catalogue()[p] for p in props]),
                "never_walked": judge.never_walked(walked),
            }

    def identify(self, target: str) -> dict[str, Any]:
        """Say what a subject is, as far as calling it shows."""
        judge = self._judge(target)
        with at_home(target):
            findings, error = judge.identify()
            anatomy = judge.anatomy()
        return {"findings": plain(findings), "anatomy": plain(anatomy), "error": error}

    def replay(self, target: str, prop: str, choices: dict[str, Any]) -> dict[str, Any]:
        """Judge one recorded case again."""
        if prop not in catalogue():
            raise ValueError(f"the recorded property {prop!r} is not in this version's catalogue")
        judge = self._judge(target)
        with at_home(target):
            return {"result": plain(judge.replay(catalogue()[prop], choices)), "probed": judge.probed}

    def _judge(self, target: str) -> Judge:
        if target not in self._judges:
            self._judges = {target: Judge(load(target)[0], self.settings)}  # one at a time: models take memory
        return self._judges[target]


def _releases(targets: Sequence[str]) -> dict[str, str]:
    """Return the releases of the libraries that targets name."""
    named = [Target.parse(word) for word in targets]
    groups = [LIBRARIES[target.place] for target in named if target.kind == LIBRARY]
    return {name: release for library in groups for name, release in library.versions().items()}


def _described(prop: Property) -> dict[str, Any]:
    return {
        "id": prop.id,
        "level": prop.level,
        "kinds": list(prop.kinds),
        "statement": prop.statement,
        "formula": prop.formula,
        "source": prop.source,
        "why": prop.explanation,
        "requires": list(prop.requires),
        "catches": list(prop.catches),
    }


for _library in ("reference", "torch"):
    shipped(_library)
catalogue()  # what every process needs is imported here, and so in the template, once for all
