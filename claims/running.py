"""From claims to a record: gather, judge, keep, and gather again only what has changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from veriformer.claims.claim import SOURCES, Claim
from veriformer.claims.coverage import SYSTEMS
from veriformer.claims.evidence import Evidence
from veriformer.claims.exercises import answered
from veriformer.claims.finding import Finding, verdict

SCHEMA = "veriformer-claims/1"
_PARTS = ("claims", "reference", "properties", "ablations")


def code_digest() -> str:
    """Return a hash of all code that a verdict may rest on, and of torch's version."""
    root, found = Path(__file__).parent.parent, hashlib.sha256(torch.__version__.encode())
    for part in _PARTS:
        for path in sorted((root / part).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def gathered(
    claim: Claim, *, quick: bool = False, folder: Path | None = None, first_seed: int | None = None
) -> dict[str, Any]:
    """Return one row of the ledger: the statement, its findings and the verdict that follows from them.

    What gathering raises is a finding too: the row is undecided and says why.

    Args:
        claim: to test.
        quick: with few seeds and small sizes.
        folder: of the records of trained models; None: nothing is kept.
        first_seed: of statistical findings; None: the usual.
    """
    see, started, problem = Evidence(quick=quick, folder=folder, first_seed=first_seed), time.perf_counter(), ""
    random, threads = torch.random.get_rng_state(), torch.get_num_threads()
    try:
        claim.gather(see)
    except Exception as raised:
        problem = f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else 'no reason given'}"
    finally:
        torch.random.set_rng_state(random)
        torch.set_num_threads(threads)
    found = "undecided" if problem else verdict(see.findings, reason=claim.reason)
    return {
        "number": claim.number,
        "statement": claim.statement,
        "topic": claim.topic,
        "sources": [{"notes": SOURCES[s[0]], "section": s[2:], "cited_as": s} for s in claim.sources],
        "formula": claim.formula,
        "derivation": claim.derivation,
        "cites": claim.cites,
        "condition": claim.condition,
        "corrected": claim.corrected,
        "reason": claim.reason,
        "findings": [told(f) for f in see.findings],
        "shown": see.shown,
        "seeds": [min(see.drawn), max(see.drawn)] if see.drawn else [],
        "problem": problem,
        "verdict": found,
        "command": f"veriformer claims {claim.number}"
        + (" --quick" if quick else "")
        + (f" --first-seed {first_seed}" if first_seed is not None and see.drawn else ""),
        "seconds": round(time.perf_counter() - started, 3),
    }


def told(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data; what is not finite is None."""
    row = {k: v if not isinstance(v, float) or abs(v) < float("inf") else None for k, v in asdict(finding).items()}
    return row | {"holds": finding.holds}


def judged_again(row: Mapping[str, Any]) -> str:
    """Return the verdict that the findings of a stored row give."""
    findings = [
        Finding(
            says=f["says"],
            role=f["role"],
            how=f["how"],
            low=float("nan") if f["low"] is None else f["low"],
            high=float("nan") if f["high"] is None else f["high"],
            least=-float("inf") if f["least"] is None else f["least"],
            most=float("inf") if f["most"] is None else f["most"],
        )
        for f in row["findings"]
    ]
    return "undecided" if row["problem"] else verdict(findings, reason=row["reason"])


def run(
    claims: Iterable[Claim],
    *,
    quick: bool,
    stored: Mapping[int, dict[str, Any]],
    folder: Path | None,
    on_row: Callable[[dict[str, Any]], None],
    first_seed: int | None = None,
) -> None:
    """Test claims one after another.

    Args:
        claims: in order.
        quick: with few seeds and small sizes.
        stored: rows of an earlier run of the same code, by number; they are not gathered again.
        folder: of the records of trained models.
        on_row: called with each row as it is finished.
        first_seed: of statistical findings; None: the usual.
    """
    for claim in claims:
        on_row(stored.get(claim.number) or gathered(claim, quick=quick, folder=folder, first_seed=first_seed))


def record_of(rows: Iterable[dict[str, Any]], *, quick: bool, first_seed: int | None = None) -> dict[str, Any]:
    """Return the ledger that reports are made of, under `veriformer-claims/1`."""
    ordered = sorted(rows, key=lambda row: row["number"])
    return {
        "schema": SCHEMA,
        "quick": quick,
        "first_seed": first_seed,
        "code": code_digest(),
        "torch": torch.__version__,
        "claims": ordered,
        "exercises": answered({row["number"]: row for row in ordered}),
        "systems": [asdict(s) | {"file": s.file, "test": s.test} for s in SYSTEMS],
    }


def rows_of(text: str, *, quick: bool, first_seed: int | None = None) -> dict[int, dict[str, Any]]:
    """Return the rows of a stored ledger that are still good: of this code and seeds, as thorough as asked; else none.

    Raises:
        ValueError: the text is no ledger.
    """
    record = json.loads(text)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not isinstance(record.get("claims"), list):
        raise ValueError(f"it is no ledger of claims ({SCHEMA})")
    others = record.get("first_seed") != first_seed
    if others or record.get("code") != code_digest() or (record.get("quick") and not quick):
        return {}
    return {row["number"]: row for row in record["claims"] if not row.get("problem")}
