"""Publish what sweeps have judged: entries of known/ applied as they are now, nothing judged again.

python benchmarks/publish_sweep.py FOLDER... --commits COMMIT...

Writes reports/gallery/compliance/ and, beside each other, report.json into build/published, which
`python benchmarks/twins.py build/published/report.json` reads. Of a model that several folders (the `--out` of
`veriformer sweep`) know, the last one counts; a sweep that goes on in parts is one sweep.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from veriformer.cli.deviating import DeviationsFile
from veriformer.properties.adapters.libraries import LIBRARIES
from veriformer.properties.results.reading import subject_of
from veriformer.properties.results.records import Report
from veriformer.reports.compliance import compliance, summary, write_compliance
from veriformer.reports.origins import place_of
from veriformer.reports.readable import cleaned
from veriformer.reports.records import write_json

ROOT = Path(__file__).parent.parent
GALLERY = ROOT / "reports" / "gallery" / "compliance"


def main() -> None:
    """Read, settle and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="--out of `veriformer sweep`")
    parser.add_argument(
        "--commits", nargs="+", required=True, help="of which the rows are, in the order of the folders"
    )
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    commits: dict[str, str] = {}
    for folder, commit in zip(given.folders, given.commits, strict=True):
        for line in (folder / "judged.jsonl").read_text(encoding="utf-8").splitlines():
            if line.strip():
                entry = json.loads(line)
                rows[entry["id"]], commits[entry["id"]] = entry["row"], commit
    order = {library: number for number, library in enumerate(LIBRARIES)}
    targets = sorted(rows, key=lambda t: (order.get(place_of(t), len(order)), t))
    report = Report([subject_of(rows[t]["subject"]) for t in targets if rows[t]["subject"]], 0, "quick")
    report.versions = {
        n: v for library in {place_of(t) for t in targets} for n, v in LIBRARIES[library].versions().items()
    }
    DeviationsFile(None, update=False, prune=False, reason=None).settle(report, Console(stderr=True))
    record = cleaned(report.to_json())
    record["not_judged"] = {t: rows[t]["error"] for t in targets if not rows[t]["subject"]}
    table = compliance(record)
    made = ", ".join(f"{count} models at {commit}" for commit, count in Counter(commits[t] for t in targets).items())
    write_json(ROOT / "build" / "published" / "report.json", record)
    write_compliance(table, GALLERY, f"veriformer sweep ({made})")
    print("\n".join(summary(table)))


if __name__ == "__main__":
    main()
