"""What somebody's own code raises: what was being done, for which variant and seed, and the lines it comes from."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from veriformer.ablations.trials.trial import Trial

_OURS = str(Path(__file__).parents[3])
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen", f"{sysconfig.get_path('stdlib')}/")
SHOWN = 4
"""Frames that are shown, the last ones."""


class OwnCodeError(Exception):
    """Somebody's own code raised, or gave what cannot be used.

    Attributes:
        told: which variant, what was being done, and what came of it, in one sentence.
        seed: of the trial.
        frames: the last lines that led there, the user's first.
    """

    def __init__(self, told: str, seed: int, frames: str = "") -> None:
        super().__init__(told, seed, frames)
        self.told, self.seed, self.frames = told, seed, frames

    def __str__(self) -> str:
        return self.told


@contextmanager
def doing(what: str, trial: Trial) -> Iterator[None]:
    """Run the block of somebody's code; what it raises names the trial, what was being done, file and line.

    Raises:
        OwnCodeError: the block raised. What says that memory is short goes through as it is.
    """
    try:
        yield
    except (OwnCodeError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as problem:  # a GeneratorExit too: whatever it is, it costs the trial
        if "can't allocate memory" in str(problem):
            raise
        where, frames = _lines(problem)
        text = str(problem).strip()
        told = f"{type(problem).__name__}: {text.splitlines()[0]}" if text else type(problem).__name__
        raise OwnCodeError(f"{named(trial)}: {what}: {told}{where}", trial.seed, frames) from problem


def named(trial: Trial) -> str:
    """Return which row a trial belongs to, in words."""
    own = trial.own
    if own is None:
        return f"task {trial.task!r}"
    setting = f", setting {own.setting!r}" if own.setting else ""
    return f"{own.study}, variant {own.variant!r}, task {trial.task!r}{setting}"


def _lines(problem: BaseException) -> tuple[str, str]:
    """Return the user's place in brackets, and the last frames that are not ours."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(_OURS)]
    users = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)]
    where = f" ({Path(users[-1].filename).name}, line {users[-1].lineno})" if users else ""
    # the user's last lines, and the library's line in which it ended
    shown = [*users[-SHOWN:], *([frames[-1]] if frames and (not users or frames[-1] is not users[-1]) else [])]
    return where, "".join(traceback.format_list(shown)).rstrip()
