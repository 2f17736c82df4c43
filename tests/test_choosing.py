"""What a bare `pytest` runs stands where it says, and shows each property failing."""

from __future__ import annotations

from pathlib import Path

import pytest

import choosing
from veriformer.properties.judging.catalogue import catalogue
from veriformer.tests.mutants import all_faults

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("place", [*choosing.ALONE, *choosing.LONG])
def test_what_is_named_is_there(place: str) -> None:
    file, _, name = place.partition("::")
    assert list(ROOT.glob(f"{file}*"))
    assert not name or name.split("[")[1].removesuffix("]") in all_faults()


def test_every_property_but_that_of_the_compiler_is_shown_failing() -> None:
    run = [n for n in choosing.shown_failing() if not n.startswith(choosing.LONG)]
    shown = {p for n in run for p in all_faults()[n.removeprefix(choosing.FAULTS).removesuffix("]")].killed_by}
    assert set(catalogue()) - shown == {"numerics.compile"}
