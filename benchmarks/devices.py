"""What another device says of the same subjects: shipped ones, traps, the fault zoo, and strangers' code.

python benchmarks/devices.py [--device cuda] [--groups shipped traps faults strangers] [--jobs 8] > devices.md

Every subject is judged on the CPU and on the device, by the same process and seed, and what differs is told: outcomes,
and the causes of failures. What was judged is kept in the store, and a second call goes on from there; `--report` makes
the page of a store that was filled on another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import pandas as pd  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import strangers  # noqa: E402

GROUPS = ("shipped", "traps", "faults", "strangers")
LOOKED_INTO = {
    "gradients.double-backward": "the fused attention of the CPU has no second derivative, that of a GPU has",
    "masking.mlm": "the example draws from a generator of the CPU while its default device is the other one",
    "droppath.expectation": "the example draws its own mask on the CPU",
    "dropout.gradient": "applies where the second derivative is there",
    "learned.table": "an index beyond the table is tried on a copy on the CPU; the example made its tensors on the GPU "
    "there and raised for that. Since then such a copy must run before it is believed",
    "sinusoidal.any-length": "as learned.table",
    "numerics.grad-mode": "with GELU the fused kernel of eval mode computes the tanh approximation (known deviation)",
    "init.loss": "weights drawn from the generator of the GPU are others",
    "gradients.gradcheck": "the fused weight_norm of the GPU; not looked into further",
    "attention.tiles": "the lower-right bias of torch with more queries than keys, where its own warning says NaN",
    "causality.alignment": "as attention.tiles",
    "permutation.equivariance": "a scripted layer under autocast; not looked into further",
}
"""What was found behind differences."""

QUIET = ("PASS", "NOT_APPLICABLE", "DEVIATION")

Row = dict[str, Any]


def names(group: str) -> list[str]:
    """Return what is judged of a group, one name a job."""
    from veriformer.properties.adapters.recognising import shipped
    from veriformer.tests.mutants import all_faults
    from veriformer.tests.traps import all_traps

    if group == "shipped":
        return [f"{library}:{name}" for library in ("reference", "torch") for name in shipped(library)]
    if group == "traps":
        return list(all_traps())
    if group == "faults":
        return list(all_faults())
    return [str(path.relative_to(strangers.SETS)) for path in sorted(strangers.SETS.glob("*/*.py"), reverse=True)]


def judge(group: str, name: str, devices: tuple[str, ...]) -> list[Row]:
    """Judge the subjects of one name on each device."""
    import torch

    from veriformer.properties import check

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for device in devices:
        for which, given in _subjects(group, name):
            start = time.perf_counter()
            report = check(given, profile="quick", device=device)
            is_unaware = any("device" in r.reason for r in report.results)
            if is_unaware:  # its tensors lie on the default device
                report = check(_on(given, device), profile="quick", device=device)
            told = [r for r in report.results if r.outcome not in QUIET]
            rows.append(
                {
                    "group": group, "name": name, "which": which, "device": device,
                    "seconds": time.perf_counter() - start, "unaware": is_unaware,
                    "judged": sum(r.outcome != "NOT_APPLICABLE" for r in report.results),
                    "outcomes": {r.id: r.outcome for r in report.results if r.outcome != "NOT_APPLICABLE"},
                    "reasons": {r.id: r.reason for r in told},
                    "causes": {r.id: r.counterexample.cause for r in told if r.counterexample},
                    "scripts": {r.id: bool(r.counterexample.script) for r in told if r.counterexample},
                    "paths": sorted({word for r in report.results for path in r.paths for word in path.split()}),
                }
            )  # fmt: skip
    return rows


def _subjects(group: str, name: str) -> Iterator[tuple[str, Any]]:
    from veriformer.properties.adapters.recognising import shipped
    from veriformer.tests.mutants import all_faults
    from veriformer.tests.traps import all_traps

    if group == "shipped":
        library, _, target = name.partition(":")
        yield "right", shipped(library)[target]
    elif group == "traps":
        yield "right", all_traps()[name].subject()
    elif group == "faults":
        yield "wrong", all_faults()[name].subject()
    else:
        yield from strangers.subjects_of(strangers.SETS / name)


def _on(subject: Any, device: str) -> Any:
    """Return a subject whose own tensors are made on the device: many examples make theirs on the default one."""
    import torch

    def there(part: Any) -> Any:
        @functools.wraps(part)
        def called(*args: Any, **kwargs: Any) -> Any:
            with torch.device(device):
                return part(*args, **kwargs)

        return called

    own = {f.name: getattr(subject, f.name) for f in fields(subject)}
    return replace(subject, **{name: there(part) for name, part in own.items() if isinstance(part, FunctionType)})


def page(rows: list[Row], device: str, machine: str) -> str:
    """Return the tables, and every subject of which the device says something else."""
    both: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        both.setdefault((row["group"], row["name"], row["which"]), {})[row["device"]] = row
    both = {key: found for key, found in both.items() if {"cpu", device} <= set(found)}
    table = []
    for group in GROUPS:
        for is_right in (True, False):
            own = [found for (g, _, which), found in both.items() if g == group and (which != "wrong") == is_right]
            if own:
                table.append({"subjects": group + ("" if is_right else ", wrong ones"), **_counted(own, device)})
    lines = [f"# The same subjects on `{device}`", "", machine, ""]
    lines += [pd.DataFrame(table).to_markdown(index=False), "", "## What differs", ""]
    lines += [line for key, found in sorted(both.items()) for line in _differences(key, found["cpu"], found[device])]
    met = {
        p for f in both.values() for p in f["cpu"]["outcomes"] | f[device]["outcomes"] if _both(f["cpu"], f[device], p)
    }
    lines += ["", "## What was found behind it", "", *(f"- {p}: {why}" for p, why in LOOKED_INTO.items() if p in met)]
    walked = Counter(word for found in both.values() for word in found[device]["paths"])
    lines += ["", f"Backends walked on `{device}`: {', '.join(sorted(w for w in walked if w.startswith('backend=')))}."]
    return "\n".join(lines)


def _counted(own: list[dict[str, Row]], device: str) -> Row:
    pairs = [(found["cpu"], found[device]) for found in own]
    seconds = [sum(row["seconds"] for row in side) for side in zip(*pairs, strict=True)]
    causes = [(one["causes"].get(i, ""), other["causes"][i]) for one, other in pairs for i in other["causes"]]
    return {
        "number": len(pairs),
        "with a failure, cpu": sum(_fails(one) for one, _ in pairs),
        f"with a failure, {device}": sum(_fails(other) for _, other in pairs),
        "other outcomes": sum(one["outcomes"] != other["outcomes"] for one, other in pairs),
        "same first cause": f"{sum(_first(a) == _first(b) for a, b in pairs)} of {len(pairs)}" if any(causes) else "",
        "seconds, cpu": round(seconds[0]),
        f"seconds, {device}": round(seconds[1]),
    }


def _fails(row: Row) -> bool:
    return any(outcome not in (*QUIET, "OPEN") for outcome in row["outcomes"].values())


def _first(row: Row) -> str:
    return next((cause for cause in row["causes"].values() if cause), "")


def _differences(key: tuple[str, str, str], cpu: Row, other: Row) -> Iterator[str]:
    differing = {p: o for p in sorted({*cpu["outcomes"], *other["outcomes"]}) if (o := _both(cpu, other, p))}
    if len(differing) > 3:
        first, (_, two) = next(iter(differing.items()))
        yield f"- {' '.join(key)}: {len(differing)} properties, {first} first, {two}: {other['reasons'].get(first, '')}"
        return
    for prop, (one, two) in differing.items():
        if prop != "gradients.double-backward":
            reason = other["reasons"].get(prop) or cpu["reasons"].get(prop) or ""
            yield f"- {' '.join(key)}: {prop} {one} on the CPU, {two}: {reason}"


def _both(cpu: Row, other: Row, prop: str) -> tuple[str, str] | None:
    one, two = (row["outcomes"].get(prop, "n.a.") for row in (cpu, other))
    return (one, two) if one != two else None


def main() -> None:
    """Judge what is not stored yet and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--store", type=Path, default=Path("build/devices.jsonl"))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600, help="start nothing after so long")
    parser.add_argument("--report", action="store_true", help="make the page of what is stored, and judge nothing")
    given = parser.parse_args()
    rows = _read(given.store)
    if not given.report:
        _judge_all(rows, given)
    machines = {row["machine"] for row in rows}
    print(page([row for row in rows if row["group"] in given.groups], given.device, "; ".join(sorted(machines)) + "."))
    print("\n`python benchmarks/devices.py`")


def _read(store: Path) -> list[Row]:
    rows = []
    for line in store.read_text(encoding="utf-8").splitlines() if store.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # cut short by an interruption
            rows.append(json.loads(line))
    return rows


def _judge_all(rows: list[Row], given: argparse.Namespace) -> None:
    import torch

    machine = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    if given.device.startswith("cuda"):
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    done = {(row["group"], row["name"]) for row in rows}
    wanted = [(group, name) for group in given.groups for name in names(group) if (group, name) not in done]
    given.store.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    with (
        given.store.open("a", encoding="utf-8") as store,
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task("judged", total=len(wanted))
        pending: dict[Any, tuple[str, str]] = {}
        while pending or (wanted and time.monotonic() < end):
            while wanted and len(pending) < 2 * given.jobs and time.monotonic() < end:
                group, name = wanted.pop(0)
                pending[pool.submit(judge, group, name, ("cpu", given.device))] = (group, name)
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                pending.pop(future)
                for row in future.result():
                    rows.append(row | {"machine": machine})
                    store.write(json.dumps(rows[-1]) + "\n")
                store.flush()
                progress.advance(task)


if __name__ == "__main__":
    main()
