"""How interpreters are started: none finds a module in the folder that it is started in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

SAFE_PATH = "-P"
"""The switch of Python that keeps the folder of a command off the path, where `-c` and `-m` put it first."""


@contextmanager
def safe_path() -> Iterator[None]:
    """Let the processes that `multiprocessing` starts in the block leave the current folder off their path.

    It starts its servers by `python -c`, which looks into the current folder first: a `json.py` that lies there would
    run before anything was asked of it. The switch is given as a word of their command line, since
    PYTHONSAFEPATH would reach what a subject starts too, and is not read under `python -E`. Their copies get the path
    of the process that asks for them, as ever.
    """
    servers: Any = util
    usual = servers._args_from_interpreter_flags

    def words() -> list[str]:
        told = usual()
        return told if SAFE_PATH in told or "-I" in told else [*told, SAFE_PATH]

    servers._args_from_interpreter_flags = words
    try:
        yield
    finally:
        servers._args_from_interpreter_flags = usual


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Let what the block starts not hear Ctrl-C, which its parent hears: a server would tell where it was importing."""
    if threading.current_thread() is not threading.main_thread():  # where Python sets no handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


@contextmanager
def safe_path_by_environment() -> Iterator[Callable[..., Any]]:
    """As `safe_path`, for interpreters that another library starts, which takes no switches.

    Yields:
        What is to be called there in place of a function, with it and its arguments: the word of the environment ends
        with it, so that nothing which the function starts is told.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield _called_without if before is None else _called
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


_VARIABLE = "PYTHONSAFEPATH"


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _called_without(function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.pop(_VARIABLE, None)
    return function(*arguments)
