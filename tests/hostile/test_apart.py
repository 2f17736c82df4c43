"""`sweep` and `mutants` on hostile code: what each does costs its own row, as with `check`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hostile.running import Told, run
from veriformer.cli import mutants
from veriformer.cli.processes import asking
from veriformer.cli.processes.apart import Apart, Call, Ended
from veriformer.cli.processes.asking import Pool
from veriformer.cli.processes.limits import Limits
from veriformer.cli.sweep import _targets
from veriformer.properties.adapters import spawned

SETTINGS = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": (), "call_seconds": 5.0, "named": ()}
LIBRARY = """
import os, signal, subprocess, sys, time
import torch
from torch import nn

os.write(1, b"imported\\n")

class Transformer(nn.Module):
    def __init__(self, dim, **options):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x, *masks, **more):
        {harm}
        return x + self.linear(x)
"""
GOOD = "pass"
HARMS = {
    "leaves in half precision": "x.dtype != torch.bfloat16 or os._exit(3)",
    "sleeps": "time.sleep(3600)",
    "leaves": "os._exit(3)",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "changes everything": "os.chdir('/'); torch.set_default_device('meta'); "
    "torch.Tensor.__sub__ = torch.Tensor.__add__",
    "forks": "[os.fork() for _ in range(6)]; time.sleep(30)",
    "daemons": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)  # left behind by a model'], "
    "start_new_session=True) if not hasattr(torch, 'left') else 0; torch.left = 1",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(asking, "Limits", functools.partial(Limits, processes=12))


def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *targets: str, seconds: str = "20", **modules: str
) -> tuple[dict[str, Any], Told]:
    """Sweep a library whose three models do harm in turn; return the report, subjects by target."""
    place = tmp_path / "installed"
    (place / "vit_pytorch-1.0.dist-info").mkdir(parents=True)
    (place / "vit_pytorch-1.0.dist-info" / "METADATA").write_text("Name: vit-pytorch\nVersion: 1.0\n")
    (place / "vit_pytorch").mkdir()
    (place / "vit_pytorch" / "__init__.py").write_text("")
    for name, harm in modules.items():
        (place / "vit_pytorch" / f"{name}.py").write_text(LIBRARY.format(harm=harm))
    monkeypatch.syspath_prepend(str(place))
    return swept(*targets, seconds=seconds)


def swept(*targets: str, seconds: str = "20") -> tuple[dict[str, Any], Told]:
    done = run("sweep", *targets, "--level", "core", "-n", "1", "--format", "json", "--model-seconds", seconds,
               "--stable", "--fresh").insist()  # fmt: skip
    report = json.loads(done.out)
    return {**report, "subjects": {s["target"]: s for s in report["subjects"]}}, done


def outcomes(subject: dict[str, Any]) -> dict[str, str]:
    return {r["id"]: r["outcome"] for r in subject["results"] if r["outcome"] != "NOT_APPLICABLE"}


def test_a_model_that_ends_its_process_at_one_property_has_its_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ("vit-pytorch:simple-vit", "torch:softmax", "vit-pytorch:vit")
    harm = HARMS["leaves in half precision"]
    report, _ = sweep(tmp_path, monkeypatch, *targets, vit=HARMS["leaves"], simple_vit=harm)
    rows = outcomes(report["subjects"]["vit-pytorch:simple-vit"])
    assert {"PASS", "ERROR"} <= {*rows.values()}
    assert [*report["not_judged"]] == ["vit-pytorch:vit"]
    assert "the process ended with status 3 while the subject was judged" in report["not_judged"]["vit-pytorch:vit"]
    assert set(outcomes(report["subjects"]["torch:softmax"]).values()) == {"PASS"}


def test_models_of_a_sweep_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("vit-pytorch:vit", "vit-pytorch:simple-vit", "vit-pytorch:na-vit", "torch:LayerNorm")
    report, _ = sweep(tmp_path, monkeypatch, *targets, vit=HARMS["changes everything"], simple_vit=GOOD,
                      na_vit=HARMS["daemons"])  # fmt: skip
    assert set(outcomes(report["subjects"]["torch:LayerNorm"]).values()) == {"PASS"}
    assert {p.name for p in tmp_path.iterdir()} == {"installed", ".veriformer"}
    told = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in told if "left behind by a model" in line]
    alone, _ = swept(*targets[1::2])
    for target in targets[1::2]:
        assert alone["subjects"][target] == report["subjects"][target]


@pytest.mark.parametrize("harm", ["sleeps", "crashes", "forks"])
def test_a_model_costs_its_own_row(harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FALLS", 1)
    report, done = sweep(tmp_path, monkeypatch, "vit-pytorch:vit", "torch:softmax", seconds="6", vit=HARMS[harm])
    assert done.status == 0
    assert set(outcomes(report["subjects"]["torch:softmax"]).values()) == {"PASS"}
    said = {"sleeps": "6 s", "crashes": "was ended by SIGSEGV", "forks": "for starting more than 12 others at a time"}
    assert said[harm] in report["not_judged"]["vit-pytorch:vit"]


JUDGING = """
import os, signal, sys, time
os.write(1, b"imported\\n")
DONE = []

def judge_fault(name, profile, seed):
    print("judging", name)
    if name == "SC04":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "SC05":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(3600)
    if name == "SC07":
        [os.fork() for _ in range(6)]
        time.sleep(30)
    if name == "SC02":
        raise SystemExit(0)
    if name == "SC02-model":
        return object()
    DONE.append(name)
    return {"id": name, "origin": "systematic", "bug": None, "title": name, "killed_by": ["norm.definition"],
            "errors": {}, "examples": {}, "seconds": 0.0, "first_kill": None, "located": "", "citation": "",
            "expected": [], "blocked": DONE}
"""


def test_a_mutant_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_judging.py").write_text(JUDGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(mutants, "_JUDGING", "hostile_judging")
    ids = ("SC01", "SC04", "SC05", "SC07", "SC02", "SC02-model", "SC02-module")
    only = [word for name in ids for word in ("--only", name)]
    done = run("mutants", *only, "-n", "1", "--mutant-seconds", "4", "--format", "json", "--stable")
    assert done.status == 2, "what breaks down is noticed, what was stopped at its limit is not judged"
    assert "Traceback" not in done.err
    assert json.loads(done.out)["timed_out"] == ["SC05"]
    rows = {row["id"]: row for row in json.loads(done.out)["mutants"]}
    told = {name: row["errors"].get("process", "") for name, row in rows.items()}
    assert told["SC01"] == told["SC02-module"] == ""
    assert rows["SC02-module"]["blocked"] == ["SC02-module"], "one process, one mutant"
    assert "was ended by SIGSEGV" in told["SC04"]
    assert "4 s" in told["SC05"]
    assert "for starting more than 12 others at a time" in told["SC07"]
    assert "SystemExit: 0" in told["SC02"]
    assert told["SC02-model"]


def test_a_library_that_is_named_with_a_colon_is_the_library() -> None:
    class Way:
        def run(self, calls: dict[str, Call], err: object) -> list[Ended]:
            row = {"names": ["a", "b"], "versions": {"torch": "2"}, "error": ""}
            return [Ended(name, row, None, None) for name in calls]

    way: Any = Way()
    for words in (("torch:",), ("torch",), ("torch", "torch:"), ("torch:", "torch:a")):
        assert _targets(words, way, way) == (["torch:a", "torch:b"], {"torch": "2"}), words
    assert _targets(("torch:b",), way, way) == (["torch:b"], {"torch": "2"})


@pytest.fixture
def apart() -> Iterator[Apart]:
    with Pool(1, SETTINGS, 8.0) as pool:
        yield Apart(pool, "calls", 60.0)


def test_each_call_has_a_copy_of_its_own_and_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: Apart
) -> None:
    (tmp_path / "counted_calls.py").write_text(
        "import os, sys\nimported, calls = os.getpid(), []\n"
        "def call(n):\n    calls.append(n)\n    print('call', n)\n"
        "    main = sys.modules['__main__'].__spec__\n"
        "    return {'calls': calls, 'imported': imported, 'own': os.getpid(), 'main': main and main.name}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from rich.console import Console

    calls = {f"{n}": Call("counted_calls:call", (n,), ("counted_calls",)) for n in range(3)}
    ended: dict[str, Ended] = {one.name: one for one in apart.run(calls, Console(quiet=True))}
    rows = [ended[f"{n}"].row or {} for n in range(3)]
    assert [row["calls"] for row in rows] == [[0], [1], [2]]
    assert len({row["imported"] for row in rows}) == 1
    assert rows[0]["main"] == spawned.__name__, "what a subject starts afresh finds the subject's file"
    assert len({row["own"] for row in rows}) == 3
    assert [ended[f"{n}"].printed for n in range(3)] == [{"size": 7, "text": f"call {n}\n"} for n in range(3)]
