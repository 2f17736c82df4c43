"""Copies of this process: made without a word from what somebody's library does at a fork."""

from __future__ import annotations

import os
import sys
import warnings


def copied() -> int:
    """Fork, as `os.fork` does: the number of the copy's process here, 0 in the copy.

    Libraries that were imported here may warn at every fork that threads are not copied (jax, and Python from 3.12 on),
    and what is registered to run at a fork may raise: Python tells of both on standard error, where nobody can do
    anything about it. A copy needs one thread alone, the one that made it; it sets torch to one, and whoever asks it
    does not wait for ever.
    """
    told = sys.unraisablehook
    sys.unraisablehook = _dropped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return os.fork()
    finally:
        sys.unraisablehook = told


def _dropped(_: object) -> None:
    return
