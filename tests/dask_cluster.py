"""A real Dask scheduler and its workers, processes of their own, on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class DaskCluster:
    """What was started.

    Attributes:
        address: of the scheduler.
        scheduler: its process.
        workers: their processes.
        folder: that new workers stand in.
    """

    address: str
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    folder: Path

    def add_worker(self, *arguments: str, before: str = "") -> subprocess.Popen[bytes]:
        """Start a worker; `before` is code that it runs first."""
        own = ("--nthreads", "1", "--local-directory", str(self.folder), *arguments)
        self.workers.append(_dask(self.folder, "dask_worker", self.address, *own, before=before))
        return self.workers[-1]


def _dask(folder: Path, command: str, *arguments: str, before: str = "") -> subprocess.Popen[bytes]:
    code = f"{before}\nfrom distributed.cli.{command} import main; main()"
    place = ("--host", "127.0.0.1", "--no-dashboard")
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *place], cwd=folder, stdout=nowhere, stderr=nowhere
    )


@contextmanager
def running(folder: Path) -> Iterator[DaskCluster]:
    """Start a scheduler without workers; end all of it at last."""
    file = folder / "scheduler.json"
    process = _dask(folder, "dask_scheduler", "--port", "0", "--scheduler-file", str(file))
    cluster = DaskCluster("", process, [], folder)
    try:
        while not (told := file.read_text() if file.exists() else "").endswith("}"):
            assert process.poll() is None, "the scheduler ended"
            time.sleep(0.05)
        cluster.address = json.loads(told)["address"]
        yield cluster
    finally:
        for one in (*cluster.workers, process):
            one.kill()
            one.wait()
