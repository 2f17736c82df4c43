"""Which verdicts of the table of parts repeat on seeds that neither it nor its sweep used.

    veriformer ablate --first-seed 3000 --out FOLDER
    cp FOLDER/table.md reports/gallery/table/other-seeds-3000.md
    python benchmarks/repeated_table.py > reports/gallery/table/repeated.md

Best settings are found by the same tuning seeds in both runs: what differs are the seeds that report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

GALLERY = Path(__file__).resolve().parent.parent / "reports" / "gallery" / "table"
PUBLISHED = GALLERY / "table.md"

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


Table = dict[tuple[str, str, str], Row]


def page(published: Table, repeated: dict[str, Table]) -> str:
    """Return the page: each verdict and those of other seeds, without theorems and rows that others are held against.

    Args:
        published: the table.
        repeated: the others by their first seed.

    Raises:
        ValueError: they hold other rows.
    """
    if not repeated or any(set(published) != set(other) for other in repeated.values()):
        raise ValueError("the tables hold other rows: run `veriformer ablate --first-seed N` without a filter")
    judged = {key: row for key, row in published.items() if _kind(row) not in ("base", "forced")}
    stable = [key for key, row in judged.items() if "unstable" not in row[0]]
    told = []
    for first, other in repeated.items():
        same = {key for key, row in judged.items() if _kind(row) == _kind(other[key])}
        told.append(
            f"On seeds from {first} on {len(same)} of {len(judged)} verdicts are the same; of the {len(stable)} that "
            f"the table does not call unstable, {len(same & set(stable))}."
        )
    head = ["task", "depth", "without", "table", *(f"seeds from {first}" for first in repeated)]
    lines = [
        (*key, *(f"{verdict}; {accuracy}" for verdict, accuracy in (row, *(t[key] for t in repeated.values()))))
        for key, row in judged.items()
    ]
    return "\n".join(
        [
            "# The table's verdicts on other seeds",
            "",
            f"{' '.join(told)} Neither the table nor its sweep used them. Rows that are theorems, and the rows that "
            "others are held against, are left out; behind a verdict stands the accuracy at the best setting. Made by",
            "",
            "```console",
            *(f"$ veriformer ablate --first-seed {first} --out FOLDER-{first}" for first in repeated),
            *(f"$ cp FOLDER-{first}/table.md reports/gallery/table/other-seeds-{first}.md" for first in repeated),
            "$ python benchmarks/repeated_table.py > reports/gallery/table/repeated.md",
            "```",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *("| " + " | ".join(cells) + " |" for cells in lines),
            "",
        ]
    )


def _kind(row: Row) -> str:
    return row[0].partition(",")[0].partition(" (")[0]


def kept() -> dict[str, Table]:
    """Return the tables of other seeds that are kept beside the table, by their first seed."""
    return {file.stem.rpartition("-")[2]: rows(file) for file in sorted(GALLERY.glob("other-seeds-*.md"))}


def main() -> None:
    """Print the page."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(page(rows(PUBLISHED), kept()), end="")


if __name__ == "__main__":
    main()
