"""Compute again how often the verdicts of a table of parts repeat, from the seeds in its JSON, and write its pages.

    python benchmarks/retell_table.py reports/gallery/table/ablation.json

Nothing is trained. For a rule of stability that is newer than the table; everything else stays as it was told.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from veriformer.ablations.verdicts.stability import repeats, shows_nothing
from veriformer.reports.records import write_json


def retold(record: dict[str, Any]) -> int:
    """Put the shares into the rows; return how many changed."""
    rows, changed = record["table"]["rows"], 0
    for device in record["table"]["devices"]:
        seeds = {_key(row): row["devices"][device]["best"]["by_seed"] for row in rows if row["devices"].get(device)}
        for row in rows:
            line = row["devices"].get(device)
            if not line or line["repeats"] is None:
                continue
            base = seeds[row["task"], row["num_layers"], ()]
            beside = [
                [v - b for b, v in zip(base, seeds[_key(other)], strict=False)]
                for other in rows
                if other is not row and other["removed"] and not other["forced"] and _key(other)[:2] == _key(row)[:2]
                if shows_nothing(other["devices"][device]["verdict"])
            ] * shows_nothing(line["verdict"])
            own = seeds[_key(row)]
            share = line["p"] / line["p_holm"] if line["p_holm"] else 1.0
            before, line["repeats"] = line["repeats"], repeats(base[: len(own)], own, share, beside)
            changed += before != line["repeats"]
    return changed


def _key(row: dict[str, Any]) -> tuple[str, int, tuple[str, ...]]:
    return row["task"], row["num_layers"], tuple(row["removed"])


def main() -> None:
    """Read, compute, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="ablation.json of `veriformer ablate`")
    file = parser.parse_args().file
    record = json.loads(file.read_text(encoding="utf-8"))
    print(f"{retold(record)} shares changed")
    write_json(file, record)
    command = ["-c", "from veriformer.cli.main import main; main()", "report", str(file), "--out", str(file.parent)]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
