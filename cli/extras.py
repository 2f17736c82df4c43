"""What a command needs beyond what `veriformer check` does: said in one sentence where it is not installed."""

from __future__ import annotations

import importlib.util

import click

EXTRAS = {"ablate": ("matplotlib", "pebble")}
"""Modules of each extra in pyproject.toml that a command imports."""


def insist_on(extra: str, command: str) -> None:
    """Refuse to begin where what an extra holds is not installed.

    Raises:
        click.UsageError: says what is missing and what installs it.
    """
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise click.UsageError(
            f"{command} needs {' and '.join(missing)}, which {are} not installed; pip install 'veriformer[{extra}]'"
        )
