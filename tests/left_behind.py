"""What a test must leave as it found it, since other tests run in the same process behind it, in any order.

Loads no torch: the process that hands out tests judges nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from veriformer.properties.adapters.homes import is_at_home

_TEMPORARY = str(Path(tempfile.gettempdir()).resolve())
_STAYS = (str(Path(__file__).resolve().parent.parent), str(Path(sys.prefix).resolve()), sys.prefix)
"""The checkout and its environment, which may lie in a temporary folder themselves."""

Seen = tuple[list[str], list[Any], tuple[Any, ...], set[str]]


def seen() -> Seen:
    """Return what there is now: paths and finders of imports, torch's flags, the names of modules.

    Not the folder: fixtures of a whole file may go to one.
    """
    return sys.path[:], sys.meta_path[:], _of_torch(), set(sys.modules)


def _of_torch() -> tuple[Any, ...]:
    """Return torch's flags but the number of threads, which is set once for all tests of a process."""
    from veriformer.properties.bench.isolation import flags

    dtype, grad, _, *others = flags()
    return dtype, grad, *others


def _put_back(of_torch: tuple[Any, ...]) -> None:
    from veriformer.properties.bench.isolation import flags, put_back

    dtype, grad, *others = of_torch
    put_back((dtype, grad, flags()[2], *others))


def changed(before: Seen) -> str:
    """Say what is otherwise than before, and put it back; "" where nothing is.

    Of modules that came from a temporary folder nothing is said: the next test does not meet them. What a library
    adds when it is first imported is its own; a user's module stays in its home.
    """
    path, finders, of_torch, modules = before
    told = []
    for name in _strange(modules) if len(sys.modules) != len(modules) else ():
        del sys.modules[name]  # of a folder that will be gone; runs of pytest inside a test leave them
    added = [p for p in sys.path if p not in path and _is_temporary(p)]
    if added or any(p not in sys.path for p in path):
        told.append(f"another sys.path: {added or 'less of it'}")
        sys.path[:] = path
    ours = [f for f in sys.meta_path if f not in finders and type(f).__module__.startswith("veriformer")]
    if ours or any(f not in sys.meta_path for f in finders):
        told.append(f"other finders of imports: {ours or 'fewer'}")
        sys.meta_path[:] = finders
    if (now := _of_torch()) != of_torch:
        told.append(f"other flags of torch: {now} in the place of {of_torch}")
        _put_back(of_torch)
    return "; ".join(told)


def _strange(modules: set[str]) -> list[str]:
    """Return the modules that came from a temporary folder, and that no home of a target holds."""
    new = {name: module for name, module in list(sys.modules.items()) if name not in modules}
    files = {name: str(getattr(module, "__file__", None) or "") for name, module in new.items()}
    files = {name: file for name, file in files.items() if not name.startswith("torch.")}  # compiled for the process
    return sorted(n for n, file in files.items() if _is_temporary(file) and not is_at_home(new[n]))


def _is_temporary(path: str) -> bool:
    return path.startswith(_TEMPORARY) and not path.startswith(_STAYS)
