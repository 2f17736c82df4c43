"""A Markdown table of the libraries checked: what passed, what deviates, what failed, and whether faults were noticed.

python benchmarks/libraries.py torch [--profile standard]
"""

from __future__ import annotations

import argparse

from tabulate import tabulate

from veriformer.properties import check
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.results.records import SubjectReport


def main() -> None:
    """Check the subjects shipped for a library and print one row each."""
    parser = argparse.ArgumentParser(description="A Markdown table of what is said of a library.")
    parser.add_argument("group", choices=("reference", "torch"))
    parser.add_argument("--profile", default="standard")
    arguments = parser.parse_args()
    rows = [
        _row(part) for subject in shipped(arguments.group).values()
        for part in check(subject, profile=arguments.profile).subjects
    ]  # fmt: skip
    print(tabulate(rows, headers="keys", tablefmt="github", colalign=("left", "right", "right", "right", "right")))


def _row(part: SubjectReport) -> dict[str, object]:
    outcomes = [result.outcome for result in part.results]
    power = part.power
    return {
        "subject": part.name,
        "pass": outcomes.count("PASS"),
        "deviation": outcomes.count("DEVIATION") or "",
        "fail": outcomes.count("FAIL") or "",
        "faults noticed": f"{power['noticed']}/{power['tried']}" if power and power["tried"] else "",
    }


if __name__ == "__main__":
    main()
