"""What a worker does: train one job, alone with its core."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from veriformer.ablations.training.loop import train
from veriformer.ablations.training.own.loop import train_own
from veriformer.ablations.trials.trial import Trial, code_digest

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGE = 2**29
"""Half a GiB: the buffers of a step stay with the process, instead of going back to the system thousands of times."""


def prepare() -> None:
    """Make this process a worker: one torch thread; on Linux no life beyond its run, and memory that is kept.

    A run that is killed would leave workers behind that train for nobody what they were handed.
    """
    torch.set_num_threads(1)
    multiprocessing.current_process().daemon = False  # or a study's loader of data could start no process
    multiprocessing.set_start_method(None, force=True)  # as this system has it, not as this process was started
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a signal that a study sends to its group is for its own
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to give the same bits again
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        mallopt = getattr(system, "mallopt", None)  # of glibc
        if mallopt is not None:
            for option in (_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD):
                mallopt(option, _LARGE)


def train_job(trials: Sequence[Trial]) -> dict[str, Any]:
    """Train the seeds of a job and return their records, with what this worker is.

    A stack that does not fit into memory is halved until it does; the records say how many were trained together.

    Raises:
        MemoryError: not even one seed fits.
    """
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if trials[0].device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    return {"records": _train(trials), "code": code_digest(), "torch": torch.__version__, "where": _where(trials[0])}


def _train(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    try:
        return train(trials) if trials[0].own is None else train_own(trials)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as problem:
        if isinstance(problem, RuntimeError) and not _is_out_of_memory(problem):
            raise
        if len(trials) == 1:
            raise MemoryError(
                f"one seed of {trials[0].task} does not fit into the memory of {trials[0].device}"
            ) from None
    gc.collect()
    if trials[0].device == "cuda":
        torch.cuda.empty_cache()
    half = len(trials) // 2
    return _train(trials[:half]) + _train(trials[half:])


def _is_out_of_memory(problem: RuntimeError) -> bool:
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


def _where(trial: Trial) -> str:
    return torch.cuda.get_device_name() if trial.device == "cuda" else "cpu"
