"""Which verdicts of the table of parts repeat on seeds that neither it nor its sweep used.

    veriformer ablate --first-seed 3000 --out FOLDER
    cp FOLDER/table.md reports/gallery/table/other-seeds.md
    python benchmarks/repeated_table.py > reports/gallery/table/repeated.md

Best settings are found by the same tuning seeds in both runs: what differs are the seeds that report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

GALLERY = Path(__file__).resolve().parent.parent / "reports" / "gallery" / "table"
PUBLISHED, REPEATED = GALLERY / "table.md", GALLERY / "other-seeds.md"

Row = tuple[str, str]
"""Verdict and accuracy at its best."""


def rows(path: Path) -> dict[tuple[str, str, str], Row]:
    """Return the rows of a table by task, depth and what is removed.

    Raises:
        ValueError: there are none.
    """
    found, header = {}, list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "verdict at best" in cells:
            header = cells
        elif header and len(cells) == len(header) and cells[1].isdigit():
            best = next(number for number, name in enumerate(header) if name.startswith("at its best"))
            found[cells[0], cells[1], cells[2]] = (cells[header.index("verdict at best")], cells[best])
    if not found:
        raise ValueError(f"{path} holds no table of parts; give the table.md of `veriformer ablate --first-seed N`")
    return found


def page(published: dict[tuple[str, str, str], Row], repeated: dict[tuple[str, str, str], Row]) -> str:
    """Return the page: each verdict twice, those of theorems and of the rows that others are held against left out.

    Raises:
        ValueError: the two hold other rows.
    """
    if set(published) != set(repeated):
        raise ValueError("the two tables hold other rows: run `veriformer ablate --first-seed N` without a filter")
    lines, same, stable, stable_same = [], 0, 0, 0
    for key, before in published.items():
        after = repeated[key]
        kinds = [row[0].partition(",")[0].partition(" (")[0] for row in (before, after)]
        if kinds[0] in ("base", "forced"):
            continue
        is_stable = "unstable" not in before[0]
        same += kinds[0] == kinds[1]
        stable += is_stable
        stable_same += is_stable and kinds[0] == kinds[1]
        lines.append("| " + " | ".join((*key, before[0], after[0], before[1], after[1])) + " |")
    return "\n".join(
        [
            "# The table's verdicts on other seeds",
            "",
            f"{same} of {len(lines)} verdicts are the same on seeds that neither the table nor its sweep used; of the "
            f"{stable} that the table does not call unstable, {stable_same}. Rows that are theorems, and the rows that "
            "others are held against, are left out. Made by",
            "",
            "```console",
            "$ veriformer ablate --first-seed 3000 --out FOLDER",
            "$ cp FOLDER/table.md reports/gallery/table/other-seeds.md",
            "$ python benchmarks/repeated_table.py > reports/gallery/table/repeated.md",
            "```",
            "",
            "| task | depth | without | table | other seeds | at its best | on other seeds |",
            "|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=REPEATED, help="table.md of a run with --first-seed")
    print(page(rows(PUBLISHED), rows(parser.parse_args().table)), end="")


if __name__ == "__main__":
    main()
