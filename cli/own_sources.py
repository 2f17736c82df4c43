"""The code that a study of one's own is made of: every file of the user's that it imports, and the libraries."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from veriformer.ablations.trials.own import Source
from veriformer.properties.adapters.places import is_of_a_library, location


def source_of(target: str, module: ModuleType, folder: Path, files: tuple[str, ...] = ()) -> Source:
    """Return what the outcome of a study depends on besides veriformer; call it in the home of the module.

    Imports are read from the source, those inside functions too; what is imported by a name that is computed is not
    seen, and belongs into the study's `files`.

    Args:
        target: absolute, for workers.
        module: that the study stands in.
        folder: that imports are found from.
        files: paths from the folder of the module's file, counted too.

    Raises:
        OSError: one of the files cannot be read.
    """
    start = Path(location(module)).resolve()
    found: dict[Path, None] = {start: None}
    libraries: dict[str, str] = {}
    waiting = [(start, module.__package__ or "")]
    while waiting:
        path, package = waiting.pop()
        for name in _imported(path, package):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "veriformer":
                continue
            for file, inside in _files_of(name):
                if file not in found:
                    found[file] = None
                    waiting.append((file, inside))
            if top in sys.modules and is_of_a_library(sys.modules[top]):
                libraries[top] = str(getattr(sys.modules[top], "__version__", ""))
    paths = [*found, *((start.parent / name).resolve() for name in files)]
    return Source(
        target=target,
        files=tuple(sorted((_named(path, folder), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths)),
        libraries=tuple(sorted(libraries.items())),
    )


def changed(source: Source, folder: Path) -> str:
    """Return the first file that is not as it was when the study was loaded, or ""."""
    for name, digest in source.files:
        path = folder / name
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                return name
        except OSError:
            return name
    return ""


def _named(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()


def _imported(path: Path, package: str) -> Iterator[str]:
    """Yield the dotted names that a file may import, wherever it does; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _files_of(name: str) -> Iterator[tuple[Path, str]]:
    """Yield the user's files that importing a name runs, its packages first, each with the package it lies in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        dotted = ".".join(parts[:end])
        loaded = sys.modules.get(dotted)
        if loaded is not None:
            file, package = location(loaded), loaded.__package__ or ""
            if is_of_a_library(loaded):
                return
        else:
            try:
                spec = importlib.util.find_spec(dotted)
            except (ImportError, ValueError, AttributeError):
                return  # `from a import b` of what is no module
            if spec is None or not spec.origin:
                return
            file, package = spec.origin, spec.parent or ""
            if "site-packages" in file or "dist-packages" in file:
                return
        if file.endswith(".py"):
            yield Path(file).resolve(), package
