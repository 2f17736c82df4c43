"""Scripts of benchmarks/ as modules: they are run by name and belong to no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def loaded(name: str) -> ModuleType:
    """Return a script by its name without `.py`."""
    found = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
