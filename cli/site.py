"""Where the page of a property is: on the site that the package names, else in what `make docs` builds.

The address stands in one place, the project's URL named Documentation in pyproject.toml; a package that was installed
from a release carries it along.
"""

from __future__ import annotations

import functools
from importlib import metadata

LABEL = "documentation"


@functools.cache
def address() -> str:
    """Return the address of the published documentation, without a last slash; "" where none is named."""
    try:
        named = metadata.metadata("veriformer").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    for entry in named:
        label, _, url = str(entry).partition(",")
        if label.strip().lower() == LABEL:
            return url.strip().rstrip("/")
    return ""


def page_of(prop: str) -> str:
    """Return where to read on about a property.

    Args:
        prop: its id.
    """
    page = f"properties/{prop}.html"
    return f"{address()}/{page}" if address() else f"build/site/{page}, in a clone, after `make docs`"
