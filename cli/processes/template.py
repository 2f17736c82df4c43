"""Where processes come from: copies of one that has torch and the catalogue imported, each in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext, SpawnContext

from veriformer.clusters.safe_path import deaf_to_interrupts, safe_path

_ALWAYS = ("torch", "hypothesis")
_LAST = "veriformer.clusters.frozen"
Context = ForkServerContext | SpawnContext


def template(*modules: str) -> Context:
    """Return the context that processes are started from.

    The template is started with the first process (or by `start`), imports the modules once, and is copied by fork
    from then on. It runs no code but imports and has one thread, so that a copy is as good as a process of its own;
    the user's code is never imported there. Where there is no fork (Windows), each process imports for itself.

    Args:
        modules: to import beside torch; those of the first call count.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # torch reads them once; several processes share the cores
        os.environ.setdefault(variable, "1")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_ALWAYS, *modules, _LAST])
    return context


def start(context: Context) -> None:
    """Start the template of a context without waiting for its imports."""
    if isinstance(context, ForkServerContext):
        from multiprocessing import forkserver

        with safe_path(), deaf_to_interrupts():
            forkserver.ensure_running()
