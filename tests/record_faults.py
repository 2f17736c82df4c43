"""Record in the package which faults show each property failing: `python tests/record_faults.py`."""

from __future__ import annotations

import json
from pathlib import Path

from veriformer.tests.mutants import all_faults

RECORD = Path(__file__).parent.parent / "properties" / "judging" / "faults_killed.json"


def killed() -> dict[str, list[dict[str, str]]]:
    """Return the faults of the zoo by the property that must notice them."""
    found: dict[str, list[dict[str, str]]] = {}
    for fault in all_faults().values():
        for prop in fault.killed_by:
            found.setdefault(prop, []).append({"id": fault.id, "title": fault.title, "citation": fault.citation})
    return dict(sorted(found.items()))


if __name__ == "__main__":
    RECORD.write_text(json.dumps(killed(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
