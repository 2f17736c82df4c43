"""Every fault is noticed by the properties that promise to, and by the scripts of their failures; every property is
needed by a fault.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest

from record_faults import RECORD, killed
from scripts_run import HOLDS, VIOLATED, decision, foreign_imports
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.counterexamples.script import COPIED
from veriformer.properties.judging.catalogue import catalogue, named
from veriformer.properties.judging.judge import Judge
from veriformer.tests.mutants import Fault, all_faults
from veriformer.tests.mutants.documented import NOT_EXPRESSED, documented

MUTANTS = all_faults()
MISLED = {
    "CM20": "on two keys a block decided by its first key is no mask at all",
    "FF07": "a layer without attention does not apply the padding mask, which is true and not what is broken",
}
"""Faults whose likely cause is named wrongly, each with the reason; the kill matrix counts them as wrong."""

WITHOUT_SCRIPT = {
    **dict.fromkeys(
        ("AT-ghost-keys", "AT-sinks-twice"), "what goes into a softmax inside the model is watched while it runs"
    ),
    "RS-norm-of-branch": "the parts of the model are read by what flows through it",
    "PM-mean-of-blocks": "what is pooled and what comes of it is watched while the model runs",
    **dict.fromkeys(
        ("twin-activation", "twin-branch", "twin-embedding", "twin-gain", "twin-logits", "twin-values"),
        "the twin is built by the whole reference, which a script that imports nothing of ours cannot do",
    ),
    "MS-in-place": "what it is given and what it returns are one tensor, which a script cannot name twice",
    "instances-cache": "what one instance leaves behind is there already when the case is written down",
    "IN-never-written": "what memory holds where nothing was written is no call that a script could make",
}
"""Faults whose first failure has no standalone script, each with the reason."""

DRAWN_ANEW = ("TK-dropout",)
"""Faults that do something else each time: whether there is a script, and whether it ends the same way, is chance."""

READ = 60
"""Lines of a script that one reads: those above what it copies. One screen."""
LONGER = {
    "BA-loss-block": 64,
    "droppath-turned-round": 80,
    "BA-loss-tail": 64,
    "CM02": 62,
    "EM07": 100,
    "droppath-inside": 84,
    "EX02": 100,
    "DR-share-forgotten": 100,
    "TL-backward-mask": 62,
    "TL-empty-uniform": 62,
    "TL-mask-keys": 62,
    "gradient-second": 78,
    "reach-window-pages": 74,
    "reach-samples": 68,
}
"""Faults whose script is longer, each with its bound: directions of many parameters, bounds of every step, many calls.

Those of 62 have 59 and 60, which a longer word in what is told of the case would break.
"""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_fault_is_noticed(mutant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = importlib.import_module(mutant.subject.__module__), mutant.subject.__name__
    subject = replace(mutant.subject(), target=f"{module.__name__}:{name}")
    judge = Judge(subject, Settings(profile="standard", named=mutant.killed_by))
    results = [judge.judge(prop) for prop in named(mutant.killed_by)]
    unnoticed = [f"{r.id}: {r.outcome} {r.reason}" for r in results if r.outcome not in ("FAIL", "OPEN")]
    assert not unnoticed, f"{mutant.title}\n" + "\n".join(unnoticed)
    told = [text for r in results if (c := r.counterexample) for text in (c.headline, c.cause)]
    # the kill matrix scores all failures; a condition that more cases showed is no cause
    silent = not any(c.cause and "fails wherever" not in c.cause for r in results if (c := r.counterexample))
    assert silent or mutant.id in MISLED or any(mutant.names(text) for text in told), told
    first = next(r.counterexample for r in results if r.id == mutant.killed_by[0])
    assert first is not None
    if mutant.id in DRAWN_ANEW:
        return
    assert bool(first.script) == (mutant.id not in WITHOUT_SCRIPT)
    if first.script:
        read, copied, _ = first.script.partition(COPIED)
        assert read.count("\n") <= LONGER.get(mutant.id, READ), "roll its loops up: `case.apply` of a function"
        assert copied or "def made(" not in first.script
        assert not foreign_imports(first.script)
        assert decision(first.script) == VIOLATED
        if (right := mutant.right) is not None:
            monkeypatch.setattr(module, name, lambda: right)
            assert decision(first.script) == HOLDS


def test_nearly_all_scripts_are_read_on_one_screen() -> None:
    assert set(LONGER) <= set(MUTANTS)
    assert len(LONGER) <= 0.03 * (len(MUTANTS) - len(WITHOUT_SCRIPT))


def test_every_property_is_needed() -> None:
    noticed = {i for f in MUTANTS.values() for i in f.killed_by}
    assert not set(catalogue()) - noticed, "properties that no fault shows failing"


def test_every_documented_defect_is_expressed_or_said_not_to_be() -> None:
    expressed = {f.bug.id for f in MUTANTS.values() if f.bug}
    assert not expressed & set(NOT_EXPRESSED)
    assert expressed | set(NOT_EXPRESSED) == set(documented())


def test_the_record_of_faults_is_that_of_the_zoo() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert recorded == killed(), "run `python tests/record_faults.py`"
