"""Which verdicts of the claims ledger repeat on seeds that it never used.

    veriformer claims 24 26 28 --first-seed 9000 --out FOLDER
    cp FOLDER/claims.json reports/gallery/claims/repeated.json
    python benchmarks/repeated_claims.py > reports/gallery/claims/repeated.md

Every claim of it whose numbers are drawn from seeds is held against the published ledger; both verdicts are computed
again from the findings that stand there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veriformer.claims.running import judged_again
from veriformer.reports.claims import number, seeds
from veriformer.reports.readable import in_markdown

GALLERY = Path(__file__).resolve().parent.parent / "reports" / "gallery" / "claims"
PUBLISHED, REPEATED = GALLERY / "claims.json", GALLERY / "repeated.json"

Rows = Mapping[int, Mapping[str, Any]]


def rows(path: Path) -> Rows:
    """Return the rows of a ledger by their numbers."""
    return {row["number"]: row for row in json.loads(path.read_text(encoding="utf-8"))["claims"]}


def table(published: Rows, repeated: Rows) -> str:
    """Return the page.

    Raises:
        ValueError: there is nothing to compare, or a claim was measured on seeds of the ledger.
    """
    lines, same, decided, turned = [], 0, 0, 0
    for n, row in sorted(repeated.items()):
        if not row["seeds"]:
            continue
        before, after = published[n], row
        if before["seeds"][0] <= after["seeds"][1] and after["seeds"][0] <= before["seeds"][1]:
            raise ValueError(
                f"claim {n} was measured on {seeds(after)}, the ledger on {seeds(before)}; give other ones"
            )
        verdicts = [judged_again(r) for r in (before, after)]
        same += verdicts[0] == verdicts[1]
        decided += "undecided" not in verdicts
        turned += "undecided" not in verdicts and verdicts[0] != verdicts[1]
        cells = (before["statement"], *verdicts, _moved(before, after))
        lines.append(f"| {n} | " + " | ".join(in_markdown(c) for c in cells) + " |")
    if not lines:
        raise ValueError("no claim that is drawn from seeds stands in it; run `veriformer claims ID --first-seed 9000`")
    numbers = [n for n in sorted(repeated) if repeated[n]["seeds"]]
    first = repeated[numbers[0]]["seeds"][0]
    left = ", ".join(str(n) for n, row in sorted(published.items()) if row["seeds"] and n not in numbers) or "none"
    return "\n".join(
        [
            "# Verdicts on other seeds",
            "",
            f"{same} of {len(lines)} verdicts repeat on seeds from {first} on, which no limit, no study and no earlier "
            f"run of the ledger used. Of the {decided} that are decided both times {turned or 'none'} turned. Claims "
            "were taken by what they cost, those that the ledger leaves undecided before others, and not by what came "
            f"out. Drawn from seeds and not repeated, for want of time: {left}. Made by",
            "",
            "```console",
            f"$ veriformer claims {' '.join(map(str, numbers))} --first-seed {first} --out FOLDER",
            "$ cp FOLDER/claims.json reports/gallery/claims/repeated.json",
            "$ python benchmarks/repeated_claims.py > reports/gallery/claims/repeated.md",
            "```",
            "",
            "| # | claim | ledger | other seeds | findings that came out otherwise: ledger's number, the other |",
            "|--:|---|---|---|---|",
            *lines,
            "",
        ]
    )


def _moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    there = {(f["role"], f["says"]): f for f in before["findings"]}
    told = []
    for f in after["findings"]:
        old = there.get((f["role"], f["says"]))
        if old is None:
            told.append(f"{f['says']}: not in the ledger")
        elif old["holds"] != f["holds"]:
            told.append(f"{f['says']}: {number(old['low'], old['high'])}, {number(f['low'], f['high'])}")
    return "; ".join(dict.fromkeys(told))


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ledger", type=Path, nargs="?", default=REPEATED, help="of a run with --first-seed")
    print(table(rows(PUBLISHED), rows(parser.parse_args().ledger)), end="")


if __name__ == "__main__":
    main()
