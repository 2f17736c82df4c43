"""Where the time goes: of a check by its parts, and of the test suite by kind of test.

    python benchmarks/where_time_goes.py check [TARGET ...] [--profile quick]      a table by part of a check
    python benchmarks/where_time_goes.py memory [TARGET ...]                       freed memory kept, and given back
    python -m pytest -n auto --whole --junitxml build/junit.xml && \
    python benchmarks/where_time_goes.py tests build/junit.xml                     a table by kind of test

The parts of a check exclude one another: what a part does inside another is taken off that other.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

PARTS = {
    "canaries": ("veriformer.properties.judging.run:send",),
    "building models": ("veriformer.properties.bench.pool:ModelPool._make",),
    "probing what is not declared": ("veriformer.properties.judging.judge:probe",),
    "measuring rounding": ("veriformer.properties.bench.measured:_kept",),
    "inside the subject": ("veriformer.properties.bench.workbench:guarded",),
    "drawing": (
        "veriformer.properties.engine.drawing:Drawing._record",
        "veriformer.properties.engine.drawing:Drawing.normal",
        "veriformer.properties.engine.drawing:Drawing.tokens",
    ),
    "comparing": (
        "veriformer.properties.engine.case:Case.close",
        "veriformer.properties.engine.case:Case.exact",
        "veriformer.properties.engine.case:Case.differs",
    ),
    "shrinking": ("veriformer.properties.engine.searching.search:Search._shrink",),
    "writing counterexamples": ("veriformer.properties.judging.outcomes:counterexample",),
    "the properties' own sums": ("veriformer.properties.engine.property:Property.check",),
    "power": ("veriformer.properties.judging.judge:power",),
}
"""Part to the functions that it is spent in."""


class Clock:
    """Time by part, each without what other parts spend inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def switch(self) -> None:
        """Book the time since the last switch on the part that is open."""
        now = time.perf_counter()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, its time booked on `part`."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._open.pop()

        return run


def check_by_part(targets: list[str], profile: str) -> pd.DataFrame:
    """Judge targets and return a row each: seconds, and the share of every part."""
    from veriformer.properties import check
    from veriformer.properties.engine.property import Property
    from veriformer.properties.judging.catalogue import catalogue
    from veriformer.properties.targets import load

    clock = Clock()
    for part, places in PARTS.items():
        for place in places:
            if place.endswith("Property.check"):
                for prop in catalogue().values():  # a field of each property, not a method
                    object.__setattr__(prop, "check", clock.watched(part, prop.check))
                continue
            module, _, path = place.partition(":")
            holder: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for step in outer:
                holder = getattr(holder, step)
            setattr(holder, name, clock.watched(part, getattr(holder, name)))
    assert Property.__dataclass_fields__["check"]
    check(
        load("torch:MultiheadAttention")[0], profile="quick"
    )  # first kernels; torch's compiler, which checkpoints import
    rows = []
    for target in targets:
        (subject,) = load(target)
        clock.spent.clear()
        started = time.perf_counter()
        clock.watched("the engine and Hypothesis", check)(subject, profile=profile)
        seconds = time.perf_counter() - started
        shares = {part: f"{clock.spent[part] / seconds:.0%}" for part in [*PARTS, "the engine and Hypothesis"]}
        rows.append({"subject": subject.name, "seconds": round(seconds, 2), **shares})
    return pd.DataFrame(rows).set_index("subject").T


def start_up() -> pd.DataFrame:
    """Return what the command pays before the first verdict, in seconds of a process each."""
    steps = {
        "the command itself": "import veriformer.cli.main",
        "torch": "import torch",
        "torch and its compiler, which checkpointing imports": "import torch._dynamo",
        "the template: torch, Hypothesis, scipy, the catalogue": "import veriformer.cli.processes.answering",
        "the template and one copy of it": (
            "from veriformer.cli.processes.asking import Pool; p = Pool(1, {'profile': 'quick', 'seed': 0, 'device': "
            "'cpu', 'dtypes': (), 'call_seconds': 30.0}, 8.0); p.__enter__().ask('describe'); p.__exit__()"
        ),
    }
    rows = []
    for name, code in steps.items():
        best = min(_seconds([sys.executable, "-c", code]) for _ in range(3))
        rows.append({"start": name, "seconds": round(best, 2)})
    return pd.DataFrame(rows)


_JUDGE = """
import resource, sys, torch
from veriformer.clusters.memory import keep_freed_memory
from veriformer.properties import check
from veriformer.properties.targets import load

torch.set_num_threads(1)
if sys.argv[2] == "kept":
    keep_freed_memory()
subject, started = load(sys.argv[1])[0], resource.getrusage(resource.RUSAGE_SELF)
check(subject, profile="quick")
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime - started.ru_utime, used.ru_stime - started.ru_stime, used.ru_minflt - started.ru_minflt)
"""


def with_memory_kept(targets: list[str], rounds: int = 3) -> pd.DataFrame:
    """Return what a check takes of the processor where freed memory goes back to the system, and where it is kept.

    The two take turns, in a process each; of every kind the one counts that took least.
    """
    rows = []
    for target in targets:
        best: dict[str, list[float]] = {}
        for kind in ("given back", "kept") * rounds:
            done = subprocess.run(
                [sys.executable, "-c", _JUDGE, target, kind], check=True, capture_output=True, text=True
            )
            used = [float(number) for number in done.stdout.split()]
            best[kind] = min(best.get(kind, used), used, key=lambda u: u[0] + u[1])
        seconds = {kind: used[0] + used[1] for kind, used in best.items()}
        rows.append({"subject": target, **{f"{kind}, s": round(s, 2) for kind, s in seconds.items()},
                     "ratio": round(seconds["kept"] / seconds["given back"], 2),
                     **{f"{kind}, page faults": int(used[2]) for kind, used in best.items()}})  # fmt: skip
    return pd.DataFrame(rows).set_index("subject")


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def tests_by_kind(report: Path) -> pd.DataFrame:
    """Return the seconds of a JUnit report by folder and file of the tests."""
    seconds: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for case in ElementTree.parse(report).iter("testcase"):
        kind = " ".join(case.get("classname", "").split(".")[1:3])
        seconds[kind] += float(case.get("time", 0))
        count[kind] += 1
    rows = [{"tests": kind, "count": count[kind], "seconds": round(seconds[kind], 1)} for kind in seconds]
    return pd.DataFrame(rows).sort_values("seconds", ascending=False)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check")
    check.add_argument("targets", nargs="*",
                       default=["torch:TransformerEncoder", "torch:MultiheadAttention",
                                "torch:scaled_dot_product_attention", "torch:softmax"])  # fmt: skip
    check.add_argument("--profile", default="quick")
    memory = commands.add_parser("memory")
    memory.add_argument("targets", nargs="*", default=["reference:causal-heads", "torch:TransformerEncoder-causal"])
    tests = commands.add_parser("tests")
    tests.add_argument("report", type=Path)
    given = parser.parse_args()
    if given.command == "tests":
        print(tests_by_kind(given.report).to_markdown(index=False))
        return
    if given.command == "memory":
        print(with_memory_kept(given.targets).to_markdown())
        return
    print(start_up().to_markdown(index=False), "\n")
    import torch

    torch.set_num_threads(1)
    print(check_by_part(given.targets, given.profile).to_markdown())


if __name__ == "__main__":
    main()
