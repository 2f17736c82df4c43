"""HTML pages: one file each, no network, everything that was found escaped and readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from veriformer.reports.readable import readable

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Return the page of a template in `templates/`; all values are escaped.

    Raises:
        LookupError: a value lacks what the template shows of it.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError  # a page is written by few

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: readable(value) if type(value) is str else value,  # what is markup is ours
    )  # fmt: skip
    try:
        return environment.get_template(template).render(**values)
    except UndefinedError as problem:
        raise LookupError(str(problem)) from None
