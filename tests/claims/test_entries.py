"""Every entry of the ledger: it comes out as published, it can come out otherwise, and it runs what the table says."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from made_up_evidence import MadeUp, Running, codes_of
from veriformer.ablations.execution.work import train_job
from veriformer.ablations.studies.study import Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import Claim, ledger
from veriformer.claims.coverage import SYSTEMS, System
from veriformer.claims.entries.bases import SMALL, study
from veriformer.claims.finding import Finding, verdict
from veriformer.claims.running import gathered, told
from veriformer.claims.trained import trained

LEDGER = Path(__file__).parents[2] / "reports" / "gallery" / "claims" / "claims.json"
VERDICTS = {row["number"]: row["verdict"] for row in json.loads(LEDGER.read_text(encoding="utf-8"))["claims"]}
EXACT = [n for n, c in ledger().items() if not c.trains]
TRAINED = [n for n, c in ledger().items() if c.trains]
WORLDS = range(30)

pytestmark = pytest.mark.usefixtures("no_properties", "no_probes")


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw what claim 34 reads off untrained encoders and claim 24 off their streams, as the trained part is drawn."""
    monkeypatch.setattr("veriformer.claims.entries.varied._probed", lambda task, how, seed: len(how) * seed % 7 / 7)
    monkeypatch.setattr("veriformer.claims.entries.depth._stream", lambda where, seed: 1.0 if where == "post" else 2.0)


@functools.cache
def exact(number: int) -> tuple[dict[str, Any], frozenset[CodeType]]:
    """Return the quick row of a claim that takes no training, and the code that ran for it; once a process."""
    with Running() as running:
        row = gathered(ledger()[number], quick=True)
    return row, frozenset(running.codes)


def made_up(claim: Claim, world: int) -> list[Finding]:
    see = MadeUp(world=world)
    claim.gather(see)
    return see.findings


@pytest.mark.parametrize("number", EXACT)
def test_a_claim_that_takes_no_training_comes_out_as_published(number: int) -> None:
    row, _ = exact(number)
    assert not row["problem"]
    assert row["verdict"] == VERDICTS[number]
    _it_can_come_out_otherwise(row["findings"])


@pytest.mark.parametrize("number", TRAINED)
def test_a_claim_on_training_follows_what_training_gave(number: int) -> None:
    outcomes = set()
    for world in WORLDS:
        found = made_up(ledger()[number], world)
        outcomes.add(tuple(f.holds for f in found))
        if len(outcomes) > 1:
            break
    else:
        pytest.fail("whatever is trained, the findings are the same")
    _it_can_come_out_otherwise([told(f) for f in found])


def _it_can_come_out_otherwise(found: list[dict[str, Any]]) -> None:
    """Feed every finding a number inside its limits, outside, and an interval that reaches over; see the verdict."""
    written = [i for i, f in enumerate(found) if f["role"] == "written"]
    others = {f["role"] for f in found} - {"written"}
    assert written
    assert len(others) < 2, "a claim has a condition or a correction"
    good, bad = [_inside(f) for f in found], [_outside(f) for f in found]
    assert verdict(good) == "holds"
    assert verdict(bad) == "undecided"
    for i in written:
        assert verdict([*good[:i], bad[i], *good[i + 1 :]]) != "holds"
        assert verdict([*good[:i], _over(found[i]), *good[i + 1 :]]) == "undecided"
    against = [b if f["role"] == "written" else g for f, g, b in zip(found, good, bad, strict=True)]
    assert verdict(against) == {"restricted": "holds if", "corrected": "refuted"}.get("".join(others), "undecided")
    for i in set(range(len(found))) - set(written):
        assert verdict([*against[:i], bad[i], *against[i + 1 :]]) == "undecided", found[i]["says"]


def _with(one: dict[str, Any], low: float, high: float) -> Finding:
    limits = {end: one[end] for end in ("least", "most") if one[end] is not None}
    return Finding(says=one["says"], role=one["role"], low=low, high=high, **limits)


def _limit(one: dict[str, Any]) -> float:
    return float(one["most"] if one["least"] is None else one["least"])


def _inside(one: dict[str, Any]) -> Finding:
    return _with(one, _limit(one), _limit(one))


def _outside(one: dict[str, Any]) -> Finding:
    far = 1 + abs(_limit(one))
    value = _limit(one) + (far if one["least"] is None else -far)
    return _with(one, value, value)


def _over(one: dict[str, Any]) -> Finding:
    ends = (_inside(one).low, _outside(one).low)
    return _with(one, min(ends), max(ends))


@contextlib.contextmanager
def _in_this_process(processes: int) -> Iterator[None]:
    yield None


@pytest.fixture
def training_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process, where it can be watched."""
    monkeypatch.setattr("veriformer.claims.trained.local", _in_this_process)
    monkeypatch.setattr(
        "veriformer.claims.trained.run_jobs",
        lambda executor, jobs, ahead: ((job, train_job(job.trials)) for job in jobs),
    )


PARTS = {
    "plain": Variant("plain"),
    "dropped": Variant("dropped", config={"drop_path": 0.2, "pooling": "weighted"}, edits=("no closing norm",)),
    "recipe": Variant("recipe", recipe={"label_smoothing": 0.1, "clip": 1e-3, "autocast": True}),
}


def test_every_system_is_run(training_here: None, tmp_path: Path) -> None:
    ran: set[CodeType] = set().union(*(exact(n)[1] for n in EXACT))
    tiny = study("tiny", {**SMALL, "num_layers": 1}, Recipe(steps=2, batch_size=4), tuple(PARTS.values()), ("precede",))
    with Running() as running:
        rows = trained(tiny, seeds=range(2), folder=tmp_path)
        for number in TRAINED:
            made_up(ledger()[number], 0)
    ran |= running.codes
    assert len({tuple(row.accuracy.tolist() + row.values(lambda r: r["loss"]).tolist()) for row in rows.values()}) == 3
    stored = trained(tiny, seeds=range(2), folder=tmp_path)
    assert {name: row.records for name, row in stored.items()} == {name: row.records for name, row in rows.items()}
    not_run = [system.name for system in SYSTEMS if system.where and not codes_of(_object(system)) & ran]
    assert not not_run


def _object(system: System) -> Any:
    module, _, name = system.where.partition(":")
    return getattr(importlib.import_module(f"veriformer.{module}"), name)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_a_system_is_in_its_file_and_has_claims_or_a_reason(system: System) -> None:
    if not system.where:
        assert system.why_not
        return
    root = Path(__file__).parents[2]
    assert codes_of(_object(system))
    assert (root / system.file).is_file()
    assert system.where.partition(":")[2] in (root / system.file).read_text(encoding="utf-8")
    assert (root / system.test.partition("::")[0]).is_file()
    assert system.claims
    assert set(system.claims) <= set(ledger())
