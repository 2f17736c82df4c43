"""No property fails on a right implementation that looks wrong."""

from __future__ import annotations

import pytest

from veriformer.properties.engine import run, select
from veriformer.properties.profiles import Settings
from veriformer.tests.traps import Trap, all_traps

TRAPS = all_traps()


@pytest.mark.parametrize("right", TRAPS.values(), ids=list(TRAPS))
def test_trap_passes(right: Trap) -> None:
    report = run([right.subject()], select(), Settings(profile="quick"))
    wrong = [f"{r.id}: {r.outcome} {r.reason}" for r in report.results if r.outcome not in ("PASS", "NOT_APPLICABLE")]
    assert not wrong, f"{right.title}\n" + "\n".join(wrong)
    assert report.ok
