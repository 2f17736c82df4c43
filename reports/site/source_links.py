"""Links of the pages in `docs/`: as written they work in a clone; on the site they go to the pages made there."""

from __future__ import annotations

import re

GALLERY = "reports/gallery/"
"""Where the gallery lies in the repository; on the site it is `gallery/`."""

MADE = {"properties": "properties/index.md", "kinds": "kinds.md", "facts": "facts.md", "outcomes": "outcomes.md",
        "studies": "studies.md"}  # fmt: skip
"""Sections of `docs/records.md`, which says where a clone has them, and the page of the site that each stands for."""

_SECTION = re.compile(rf"(\]\((?:\.\./)*)records\.md#({'|'.join(MADE)})(?: \"([\w-]+)\")?\)")
_FILE = re.compile(rf"(\]\((?:\.\./)*)\.\./{GALLERY}")


def for_the_site(markdown: str) -> str:
    """Return a page of `docs/` with the links that it has on the site.

    >>> for_the_site('[OPEN](records.md#outcomes "open"), [kinds](../records.md#kinds)')
    '[OPEN](outcomes.md#open), [kinds](../kinds.md)'
    >>> for_the_site("[twins](../reports/gallery/twins.md)")
    '[twins](gallery/twins.md)'
    """
    told = _SECTION.sub(lambda m: f"{m[1]}{MADE[m[2]]}{'#' + m[3] if m[3] else ''})", markdown)
    return _FILE.sub(r"\1gallery/", told)
