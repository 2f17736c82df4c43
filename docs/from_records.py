"""The pages that are made of the package's records, by their place on the site.

Every record is read from where the commands read it (`veriformer list`, `explain`, `kinds`, `facts`), so that the site
says what they say; nothing of torch is loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from veriformer.cli import index
from veriformer.cli.words import kinds_and_facts, optional_callables, polarity
from veriformer.properties.results.records import OUTCOMES
from veriformer.reports.site.property_page import catalogue_page, property_page
from veriformer.reports.site.tolerances import judgings
from veriformer.reports.site.word_pages import facts_page, kinds_page, outcomes_page, studies_page
from veriformer.reports.verdicts import MEANINGS, STATUSES

ROOT = Path(__file__).parent.parent


def generated() -> dict[str, str]:
    """Return the pages made of records, by their place."""
    records, faults = index.properties(), index.faults_shown()
    failures: dict[str, Any] = json.loads((ROOT / "docs" / "failures.json").read_text(encoding="utf-8"))
    judging = judgings(ROOT / "src" / "veriformer")
    kinds, facts = kinds_and_facts()
    counts = Counter(kind for record in records.values() for kind in record["kinds"])
    pages = {
        "properties/index.md": catalogue_page(list(records.values()), faults),
        "kinds.md": kinds_page(kinds, optional_callables(), polarity(), counts),
        "facts.md": facts_page(facts),
        "outcomes.md": outcomes_page(OUTCOMES, MEANINGS, STATUSES),
        "studies.md": studies_page(index.studies()),
    }
    for name, record in records.items():
        requiring = [other["id"] for other in records.values() if name in other["requires"]]
        pages[f"properties/{name}.md"] = property_page(
            record, faults.get(name, ()), failures.get(name), judging[name], requiring
        )
    return pages
