"""What commands say of the catalogue and of the studies without importing them: records that a test holds to both."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

RECORD = "index.json"
Shown = dict[str, list[dict[str, str]]]
"""Faults, by the property that they show failing."""


@functools.cache
def _recorded() -> dict[str, Any]:
    text = resources.files("veriformer.cli").joinpath(RECORD).read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text)
    return record


def properties() -> dict[str, dict[str, Any]]:
    """Return every property of the catalogue, described, by its id."""
    return {record["id"]: record for record in _recorded()["properties"]}


def studies() -> list[dict[str, Any]]:
    """Return every study and measurement: name, question, whether it is run by default."""
    return list(_recorded()["studies"])


def joined(ours: Shown, theirs: Shown) -> Shown:
    """Return the faults of both, by the property that they show failing."""
    return {prop: [*ours.get(prop, ()), *theirs.get(prop, ())] for prop in ours | theirs}


@functools.cache
def faults_shown() -> Shown:
    """Return, for each property, the faults of the zoo that show it failing: id, title, citation."""
    text = resources.files("veriformer.properties.judging").joinpath("faults_killed.json").read_text(encoding="utf-8")
    shown: Shown = json.loads(text)
    return shown


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean ...? ` for the name that is nearest to a word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def live() -> dict[str, Any]:
    """Return what the record has to say, of the catalogue and the studies as they are: imports both."""
    from veriformer.ablations.studies import DEFAULT, MEASUREMENTS, STUDIES, TABLE
    from veriformer.ablations.table.design import QUESTION
    from veriformer.properties.judging.catalogue import catalogue

    known: list[Any] = [*STUDIES.values(), *MEASUREMENTS.values()]
    return {
        "properties": [
            {
                "id": p.id, "level": p.level, "kinds": list(p.kinds), "statement": p.statement, "formula": p.formula,
                "source": p.source, "catches": list(p.catches), "requires": list(p.requires),
                "explanation": p.explanation,
            }
            for p in catalogue().values()
        ],
        "studies": [
            {"name": TABLE, "question": QUESTION, "default": TABLE in DEFAULT},
            *({"name": s.name, "question": s.question, "default": s.name in DEFAULT} for s in known),
        ],
    }  # fmt: skip
