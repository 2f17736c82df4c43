"""Which released models are proved equal to the textbook's, and where the others part: a table of a sweep.

veriformer sweep --out build/sweep && python benchmarks/twins.py build/sweep/report.json > reports/gallery/twins.md

Every encoder, decoder, encoder-decoder and classifier of the sweep that twin.equal judged, at the sizes of its profile,
with weights drawn at random; nothing is downloaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from veriformer.reports.compliance_rows import twin_of
from veriformer.reports.reach import sizes
from veriformer.reports.records import read_json
from veriformer.reports.verdicts import name_of


def main() -> None:
    """Read the report and print."""
    (report,) = sys.argv[1:]
    record = read_json(Path(report))
    rows = []
    for subject in record["subjects"]:
        twin, told = twin_of(subject)
        if twin:
            result = next(r for r in subject["results"] if r["id"] == "twin.equal")
            rows.append({"model": name_of(subject), "twin": twin, "where": told, **_measured(result)})
    table = pd.DataFrame(rows)
    proved, parted = table[table.twin == "equal"], table[table.twin == "parts"]
    asked = table[~table.twin.isin(["equal", "parts"])]
    print("# Models proved equal to the textbook's\n")
    print("Made by `veriformer sweep --out build/sweep && python benchmarks/twins.py build/sweep/report.json`,")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
    print(f"profile {record['profile']}. {versions}.\n")
    print(f"Of {len(table)} models {len(proved)} are equal to the reference Transformer with their own")
    print(f"weights, {len(parted)} part from it, {len(asked)} are asked about or not judged. Equal means: the same")
    print("outputs up to the tolerance measured on the model, for drawn tokens and lengths and, where it takes a mask,")
    print(
        "under padding and through the cache; `error` is the largest difference of an output, relative to the root mean"
    )
    print("square of the twin's.\n")
    shown = proved.assign(textbook=proved["where"].str.removeprefix("equal to the textbook's model "))
    columns = ["model", "textbook", "sizes", "error", "seconds"]
    print(shown[columns].to_markdown(index=False, floatfmt=".2g"))
    for title, part in (("Where the others part", parted), ("Asked, or not judged", asked)):
        print(f"\n## {title}\n")
        print(part[["model", "outcome", "where"]].to_markdown(index=False))


def _measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands in the table beside a model: the largest difference, relative to the outputs' size."""
    return {
        "outcome": result["outcome"], "seconds": result["seconds"], "sizes": sizes(result),
        "error": result["measures"].get("apart from the twin", math.nan),
    }  # fmt: skip


if __name__ == "__main__":
    main()
