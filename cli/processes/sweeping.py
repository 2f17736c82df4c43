"""One target judged for a sweep: called in a process of its own, gives plain data."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # several models share the cores
    os.environ.setdefault(_variable, "1")


def judge_target(target: str, level: str, profile: str, seed: int, memory_gib: float) -> dict[str, Any]:
    """Load one target and judge it by the catalogue.

    Returns:
        `{"subject": record, "error": ""}`; the record is None, and the error one sentence, if it cannot be built.
    """
    import torch

    from veriformer.cli.processes.limits import limit_memory
    from veriformer.properties.adapters.target import TargetError
    from veriformer.properties.bench.guards import is_its_own, told
    from veriformer.properties.bench.isolation import kept_flags
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.catalogue import select
    from veriformer.properties.judging.run import judge_subject
    from veriformer.properties.results.records import ERROR, NOT_APPLICABLE, plain
    from veriformer.properties.targets import load

    torch.set_num_threads(1)
    limit_memory(memory_gib)
    started = time.perf_counter()
    with _quiet(), kept_flags(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            (subject,) = load(target)
            part = judge_subject(subject, select(level=level), Settings(profile=profile, seed=seed))
        except TargetError as problem:
            return {"subject": None, "error": str(problem)}
        except BaseException as problem:
            if not is_its_own(problem):
                raise
            return {"subject": None, "error": f"judging it raised {told(problem)}"}
    gc.collect()
    judged = [r for r in part.results if r.outcome not in (ERROR, NOT_APPLICABLE)]
    reason = next((r.reason for r in part.results if r.outcome == ERROR), "no property applies")
    if not judged:
        return {"subject": None, "error": reason}
    return {"subject": {**plain(part), "seconds": round(time.perf_counter() - started, 3)}, "error": ""}


@contextmanager
def _quiet() -> Iterator[None]:
    """Send to nowhere what is printed, from Python or from C; and be somewhere again afterwards."""
    here = Path.cwd()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
        try:
            yield
        finally:
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
            os.chdir(here)


def judge_canaries(kinds: list[str], level: str, profile: str, seed: int) -> dict[str, Any]:
    """Send the known-broken models of these kinds through the engine."""
    import torch

    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.canaries import send
    from veriformer.properties.judging.catalogue import select

    torch.set_num_threads(1)
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
