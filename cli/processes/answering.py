"""The other side of `asking`: a process that judges. What hangs, crashes or eats memory there costs one result."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import warnings
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from veriformer.cli.processes.limits import Limits
from veriformer.cli.processes.nursing import Guard, captured, expendable, nursed, nursed_each
from veriformer.cli.processes.plugging import described
from veriformer.cli.processes.wire import Wire
from veriformer.clusters.memory import freeze, keep_freed_memory, seldom_collect
from veriformer.properties.adapters.homes import Surroundings
from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.adapters.pasted import as_source
from veriformer.properties.adapters.plugins import Plugin, PluginError
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.adapters.target import LIBRARY, Target, TargetError, is_a_file_alone
from veriformer.properties.bench.guards import whose_fault
from veriformer.properties.bench.isolation import is_lost, kept_flags
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.extending import load as load_plugins
from veriformer.properties.judging.canaries import send
from veriformer.properties.judging.catalogue import catalogue, select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.clocks import ENDED_FOR, PULSE
from veriformer.properties.results.reading import result_of
from veriformer.properties.results.records import TIMEOUT, plain
from veriformer.properties.subject.claims import claims_of
from veriformer.properties.subject.raised import told
from veriformer.properties.subject.subject import Subject
from veriformer.properties.targets import at_home, load

_ASKED_BY_USERS = ("select", "replay")
"""Questions whose arguments a user wrote: what is wrong with them is told as it is."""

Message = tuple[str, dict[str, Any]]


def serve(
    end: socket.socket,
    output: Connection,
    pulse: MutableSequence[float],
    settings: dict[str, Any],
    limits: Limits,
    modules: Sequence[str] | None,
) -> None:
    """Answer requests until the connection closes, in a process of its own.

    Args:
        end: receives `[number, question, arguments]`, sends `[number, "ok", answer, is_spent, fell]` or `[number,
            "refused", {"why", "is_usage"}, is_spent, fell]`; a process that is spent can answer nothing more, and in
            one that fell a call of the subject hung.
        output: what is written to the descriptors 1 and 2 goes there.
        pulse: shared numbers in which the asking side sees what is done; see `Pulse`.
        settings: fields of `Settings`, dtypes as names.
        limits: of the process and all that it starts.
        modules: to import once, for a copy of the process to answer each question; None for one process for all.
    """
    if settings["device"] != "cpu":
        limits = replace(limits, memory_gib=0)
    guard = Guard(limits, lambda number: pulse.__setitem__(ENDED_FOR, number))
    if modules is None:
        nursed(lambda: _serve(Wire(end), captured(output), pulse, settings, limits, once=False), (end, output), guard)
        return
    flush = captured(output)

    def prepare() -> None:
        for name in modules:
            with contextlib.suppress(Exception):  # told by whoever needs it
                importlib.import_module(name)
        freeze()
        flush()

    def answer(wire: Wire, question: Any) -> None:
        wire.push(question)
        _serve(wire, flush, pulse, settings, limits, once=True)

    with contextlib.suppress(EOFError, OSError):
        nursed_each(answer, Wire(end), (end,), guard, prepare)


def _serve(
    wire: Wire,
    flush: Callable[[], None],
    pulse: MutableSequence[float],
    settings: dict[str, Any],
    limits: Limits,
    *,
    once: bool,
) -> None:
    expendable()
    torch.set_num_threads(1)
    keep_freed_memory()
    seldom_collect()
    limits.hold()
    answers, own = Answers(settings), os.getpid()
    PULSE.share(pulse)
    with contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        while True:
            number, question, arguments = wire.receive()
            verdict, answer = answers.answer(question, arguments)
            flush()
            if os.getpid() != own:  # a copy that the subject made of its process
                os._exit(0)
            fell = PULSE.hangs > 0 and answer.get("result", {}).get("outcome") == TIMEOUT
            wire.send([number, verdict, answer, answers.is_spent, fell])
            if once:
                return


class Answers:
    """One target that was loaded, and the judge of each of its subjects."""

    def __init__(self, settings: dict[str, Any]) -> None:
        dtypes = tuple(getattr(torch, name) for name in settings.get("dtypes", ()))
        named = tuple(settings.get("named", ()))
        self._said = {"kind": settings.get("kind"), "declares": settings.get("declares")}
        self._plugins = [Plugin(**one) for one in settings.get("plugins", ())]
        own = {name: value for name, value in settings.items() if name not in self._said and name != "plugins"}
        self.settings = Settings(**{**own, "dtypes": dtypes, "named": named})
        self._judges: dict[str, Judge] = {}
        self._base = Path.cwd()
        self._surroundings = Surroundings()

    def answer(self, question: str, arguments: dict[str, Any]) -> Message:
        """Return `("ok", answer)` or `("refused", {"why": sentence})`."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._plug()
                return "ok", getattr(self, question)(**arguments)
        except TargetError as problem:
            return "refused", {"why": str(problem), "is_usage": problem.is_usage}
        except PluginError as problem:
            return "refused", {"why": str(problem), "is_usage": True}
        except BaseException as problem:  # a worker that dies takes the reason with it
            if question in _ASKED_BY_USERS and isinstance(problem, KeyError | ValueError):
                return "refused", {"why": str(problem.args[0]) if problem.args else str(problem)}
            fault = whose_fault(problem)
            said = f"the subject's code raised {told(problem)} ({fault})" if fault else (
                f"veriformer itself failed: {told(problem)} (please report this)"
            )  # fmt: skip
            return "refused", {"why": said, "is_usage": False}
        finally:
            self._surroundings.put_back()

    @property
    def is_spent(self) -> bool:
        """Whether nothing more can be judged by this process: an assertion failed on the GPU."""
        return is_lost(torch.device(self.settings.device))

    def _plug(self) -> None:
        before = PULSE.begin(0)  # the asking side limits it as a whole
        try:
            with kept_flags():
                load_plugins(self._plugins)
        finally:
            PULSE.end(before)

    def plugged(self) -> dict[str, Any]:
        """Say what the plug-ins add."""
        plugins = described(self._plugins)
        return {"plugins": plugins,
                "properties": [_described(catalogue()[i]) for one in plugins for i in one["properties"]]}  # fmt: skip

    def call(self, function: str, arguments: Sequence[Any]) -> dict[str, Any]:
        """Call a function of veriformer's own, `module:name`."""
        module, _, name = function.partition(":")
        found: dict[str, Any] = getattr(importlib.import_module(module), name)(*arguments)
        return found

    def select(self, only: Sequence[str], exclude: Sequence[str], level: str) -> dict[str, Any]:
        """Select properties, described in plain words."""
        if self.settings.device.startswith("cuda") and not torch.cuda.is_available():
            device = self.settings.device
            raise ValueError(
                f"device was {device!r} and this machine has no CUDA that torch can use; leave --device out"
            )
        return {
            "properties": [_described(p) for p in select(only, exclude, level)],
            "catalogue": list(catalogue()),
        }

    def load(self, target: str, props: Sequence[str] = ()) -> dict[str, Any]:
        """Load a target; its subjects described in plain words, and what is planned for large ones by properties."""
        subjects = self._loaded(target)
        return {
            "subjects": [{**_named(s), "plan": self._planned(s, props)} for s in subjects],
            "versions": _releases([target]),
            "chosen": subjects[0].notes[0] if is_a_file_alone(target) else "",
        }

    def _planned(self, subject: Subject, props: Sequence[str]) -> dict[str, Any] | None:
        """Say what is planned for a large instance, and keep its judge: what was loaded and measured is not again."""
        if not props:
            return None
        judge = Judge(subject, self.settings)
        with at_home(subject.target, self._base):
            plan = judge.plan([catalogue()[prop] for prop in props])
        if plan is None:
            return None
        self._judges = {subject.target: judge}
        return {"told": plan.told, "sentence": plan.sentence, "property_seconds": plan.property_seconds}

    def describe(self) -> dict[str, Any]:
        """Describe the whole catalogue."""
        return {"properties": [_described(p) for p in catalogue().values()]}

    def applicable(self, target: str, props: Sequence[str]) -> dict[str, Any]:
        """Say which of these properties are judged on a subject, as far as can be told before they are."""
        judge = self._judge(target)
        with at_home(target, self._base):
            return {"props": [prop for prop in props if judge.applies(catalogue()[prop])]}

    def judge(self, target: str, prop: str, known: dict[str, str]) -> dict[str, Any]:
        """Judge one property of one subject; `known` are outcomes found by other workers."""
        judge = self._judge(target)
        for prop_id, outcome in known.items():
            judge.learn(prop_id, outcome)
        with at_home(target, self._base):
            result = judge.judge(catalogue()[prop])
        return {"result": plain(result), "probed": judge.probed, "verified": sorted(judge.verified)}

    def canaries(self, kinds: Sequence[str], props: Sequence[str]) -> dict[str, Any]:
        """Send known-broken models of these kinds through the engine; no limit of time but that of the question."""
        return send(kinds, [catalogue()[p] for p in props], self.settings)

    def power(
        self, target: str, props: Sequence[str], walked: Sequence[str], troubled: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Put faults into a subject, to be noticed by these properties; and tell which paths were never walked.

        Of its failures and questions, `troubled`, found by several workers, those are given back that turn out to be
        questions, or that one change of its code explains.
        """
        judge = self._judge(target)
        results = [result_of(record) for record in troubled]
        judged = [catalogue()[r.id] for r in results]
        with at_home(target, self._base):
            again = [*judge.reconsider_all(results, judged), *judge.explain(results, judged)]
            return {
                "reconsidered": plain(list({r.id: r for r in again}.values())),
                "power": judge.prove_power([catalogue()[p] for p in props]),
                "never_walked": judge.never_walked(walked),
                "anatomy": plain(judge.anatomy()),
            }

    def identify(self, target: str) -> dict[str, Any]:
        """Say what a subject is, as far as calling it shows."""
        judge = self._judge(target)
        with at_home(target, self._base):
            findings, error = judge.identify()
            anatomy = judge.anatomy()
        return {"findings": plain(findings), "anatomy": plain(anatomy), "error": error}

    def pasted(self, target: str) -> dict[str, Any]:
        """Return the Subject that is understood of a target as the source of a file, or why there is none."""
        subjects = self._loaded(target)
        return {"source": as_source(subjects[0]), "target": subjects[0].target, "kind": subjects[0].kind}

    def replay(self, target: str, prop: str, choices: dict[str, Any]) -> dict[str, Any]:
        """Judge one recorded case again."""
        if prop not in catalogue():
            raise ValueError(f"the recorded property {prop!r} is not in this version's catalogue")
        judge = self._judge(target)
        with at_home(target, self._base):
            return {"result": plain(judge.replay(catalogue()[prop], choices)), "probed": judge.probed}

    def _judge(self, target: str) -> Judge:
        if target not in self._judges:
            self._judges = {target: Judge(self._loaded(target)[0], self.settings)}  # one at a time: models take memory
        return self._judges[target]

    def _loaded(self, target: str) -> list[Subject]:
        before = PULSE.begin(0)  # the asking side limits it as a whole
        try:
            with kept_flags():
                return load(target, self._base, **self._said)
        finally:
            PULSE.end(before)


def _releases(targets: Sequence[str]) -> dict[str, str]:
    """Return the releases of the libraries that targets name."""
    named = [Target.parse(word) for word in targets]
    groups = [LIBRARIES[target.place] for target in named if target.kind == LIBRARY]
    return {name: release for library in groups for name, release in library.versions().items()}


def _named(subject: Subject) -> dict[str, Any]:
    facts = plain(dict(subject.declares))
    return {
        "name": subject.name,
        "kind": subject.kind,
        "target": subject.target,
        "facts": facts,
        "claims": claims_of(subject),
    }


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
