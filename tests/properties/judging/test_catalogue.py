"""Ids are stable for ever, and every property says what it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from veriformer.properties.engine.property import Property
from veriformer.properties.judging.catalogue import catalogue, faults_shown

KNOWN = (Path(__file__).parent / "catalogue_ids.txt").read_text(encoding="utf-8").split()


def test_no_id_is_lost() -> None:
    assert not set(KNOWN) - set(catalogue()), "an id that people outside rely on is gone"
    assert not set(catalogue()) - set(KNOWN), "add the new ids to catalogue_ids.txt"


@pytest.mark.parametrize("prop", catalogue().values(), ids=list(catalogue()))
def test_it_explains_itself(prop: Property) -> None:
    assert prop.statement.endswith(".")
    assert prop.formula
    assert prop.source
    assert len(prop.explanation) > 30
    assert faults_shown()[prop.id]
