"""What was judged, kept: a line of JSON each, so that an interrupted command goes on where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from veriformer.reports.records import read_bytes


@dataclass(frozen=True)
class JudgedStore:
    """What was judged: a line of JSON each, valid for one state of the code and one way to judge.

    Attributes:
        path: of the file.
        key: names that state and that way; lines of another key are passed over.
    """

    path: Path
    key: str

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the rows by id; a line that an interruption left in part counts as not judged."""
        rows: dict[str, dict[str, Any]] = {}
        for line in read_bytes(self.path).splitlines() if self.path.exists() else ():
            try:
                record = json.loads(line)
                if record["key"] == self.key:
                    rows[record["id"]] = record["row"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return rows

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a row.

        Raises:
            OSError: the disk is full, or the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "it is no file, and one is required", str(self.path))
        line = json.dumps({"key": self.key, "id": name, "row": row})
        with self.path.open("ab", buffering=0) as file:
            # in one write, so that two runs in one folder leave whole lines; behind what a kill left in part, a new one
            told = f"\n{line}\n".encode()
            if file.write(told) < len(told):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def fingerprint(packages: Iterable[ModuleType]) -> str:
    """Return a digest of the code and data of these packages, and of the release of torch.

    Known deviations (`known/`) do not count: they are applied to verdicts, not part of them.
    """
    import torch

    return _digest(torch.__version__, (folder for package in packages for folder in package.__path__))


def release() -> dict[str, str]:
    """Return what two machines must have in common, by name, so that they judge alike; torch is not imported."""
    found = map(find_spec, ("veriformer.reference", "veriformer.properties", "veriformer.tests.mutants"))
    own = [folder for spec in found if spec for folder in spec.submodule_search_locations or ()]
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version(name) for name in ("torch", "hypothesis", "numpy", "scipy")},
        "the code of veriformer": _digest("", own)[:8],
    }


def _digest(start: str, folders: Iterable[str]) -> str:
    digest = hashlib.sha256(start.encode())
    for folder in map(Path, folders):
        for file in sorted(
            f for f in folder.rglob("*") if f.suffix in (".py", ".jsonl", ".toml") and f.parent.name != "known"
        ):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
