"""What was judged, kept: a line of JSON each, so that an interrupted command goes on where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


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
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
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

    digest = hashlib.sha256(torch.__version__.encode())
    for package in packages:
        for folder in map(Path, package.__path__):
            for file in sorted(
                f for f in folder.rglob("*") if f.suffix in (".py", ".jsonl", ".toml") and f.parent.name != "known"
            ):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
