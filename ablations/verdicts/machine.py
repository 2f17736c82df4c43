"""The machine that a run's numbers come from."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine(told: Path = Path("/proc/cpuinfo")) -> dict[str, str | int | None]:
    """Return the processor's name and its cores.

    Args:
        told: where Linux says what the processor is; without it, its architecture has to do.
    """
    try:
        lines = told.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"processor": next(names, platform.machine()), "cores": os.cpu_count()}
