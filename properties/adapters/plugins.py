"""Which plug-ins there are, without importing one, nor torch; `veriformer.properties.extending` says what they hold."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache

GROUP = "veriformer.plugins"
"""Of entry points: a package that is installed names its plug-ins there, each a module."""


class PluginError(Exception):
    """A plug-in that cannot be taken; says which and why in one sentence."""


@dataclass(frozen=True)
class Plugin:
    """Where a plug-in comes from.

    Attributes:
        name: by which its subjects are known.
        module: dotted.
        origin: who named it, in words: a distribution with its release, or the file of a project.
        folder: that the module is found from; "" where it is installed.
    """

    name: str
    module: str
    origin: str
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.origin})"


def installed() -> list[Plugin]:
    """Return the plug-ins of the packages that are installed, by name.

    Raises:
        PluginError: one is no module, or two have one name.
    """
    return list(_found_on(tuple((folder, _changed(folder)) for folder in sys.path)))


def _changed(folder: str) -> int:
    """Return when something was last added to a folder, or taken from it; 0 for what is none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _found_on(path: tuple[tuple[str, int], ...]) -> tuple[Plugin, ...]:
    """Return the plug-ins of the packages on a search path: each is looked at once, as long as no folder changes."""
    from importlib.metadata import entry_points

    found: dict[str, Plugin] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        release = f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"
        one = Plugin(point.name, point.module, release)
        if point.attr:
            raise PluginError(f"the plug-in {one} is {point.value!r}; its entry point must name a module alone")
        add(found, one)
    return tuple(found.values())


def add(found: dict[str, Plugin], one: Plugin) -> None:
    """Add a plug-in; one that is there already is left as it is.

    Raises:
        PluginError: another one has its name.
    """
    if any(other.module == one.module for other in found.values()):
        return
    if one.name in found:
        raise PluginError(f"the plug-ins {found[one.name]} and {one} have one name; leave one of them out")
    found[one.name] = one
