"""Record how each property fails on a fault of the zoo, for its page: `python tests/record_failures.py [ID ...]`.

Without ids every property is recorded anew; it takes about ten minutes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.catalogue import catalogue, named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import FAIL, OPEN, Result
from veriformer.reports.failure import paper, print_case, written
from veriformer.reports.readable import cleaned
from veriformer.tests.mutants import Fault, all_faults

RECORD = Path(__file__).parent.parent / "docs" / "failures.json"
TRIED = 4  # a property of so many faults is shown by one of them


def recorded(prop: Property) -> dict[str, Any] | None:
    """Return how a property fails: the fault, the outcome and the words of the failure. None if no fault shows it.

    Faults with a citation come first; of the first few the one whose failure says most is told.
    """
    faults = sorted((f for f in all_faults().values() if prop.id in f.killed_by), key=_rank)
    best: dict[str, Any] | None = None
    for fault in faults[:TRIED]:
        result = _judged(fault, prop)
        if result is None or result.counterexample is None:
            continue
        told = _told(fault, prop, result)
        best = best or told
        if result.outcome == FAIL and result.counterexample.cause:
            return told
    return best


def _rank(fault: Fault) -> tuple[bool, bool, str]:
    return "://" not in fault.citation, not fault.citation, fault.id


def _judged(fault: Fault, prop: Property) -> Result | None:
    """Return the outcome, with what it requires judged before it."""
    judge = Judge(fault.subject(), Settings(profile="quick", seed=0, named=(prop.id,)))
    results = [judge.judge(each) for each in named([prop.id])]
    last = next(r for r in results if r.id == prop.id)
    return last if last.outcome in (FAIL, OPEN) else None


def _told(fault: Fault, prop: Property, result: Result) -> dict[str, Any]:
    plain = cleaned(asdict(result))
    console = paper(80)
    print_case(console, plain, prop.statement, fault.id, again="", script="")
    return {"fault": fault.id, "outcome": result.outcome, "text": written(console)}


def main(ids: list[str]) -> None:
    """Record the properties that are named, or all."""
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if ids and RECORD.exists() else {}
    for prop in catalogue().values():
        if not ids or prop.id in ids:
            print(prop.id, file=sys.stderr, flush=True)
            known.pop(prop.id, None)
            if found := recorded(prop):
                known[prop.id] = found
    text = json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
