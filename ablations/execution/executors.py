"""Where jobs run: processes of this machine, or a cluster. One door for all."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from veriformer.ablations.execution.plan import Job
from veriformer.ablations.execution.work import prepare, train_job
from veriformer.clusters.attempts import Attempts, Executor
from veriformer.clusters.opening import open_cluster
from veriformer.clusters.safe_path import safe_path


def run_jobs(
    executor: Executor, jobs: Sequence[Job], *, ahead: int, work: Callable[..., dict[str, Any]] = train_job
) -> Iterator[tuple[Job, dict[str, Any] | BaseException]]:
    """Yield each job as it ends, with what its worker returned or why it failed.

    Args:
        executor: where they run.
        jobs: in the order in which they are begun.
        ahead: jobs handed over at a time, so that a stop has little to cancel.
        work: what a worker does with the trials of a job.
    """
    waiting, running = list(reversed(jobs)), Attempts[Job](executor)
    try:
        while waiting or running:
            while waiting and len(running) < ahead:
                job = waiting.pop()
                running.begin(job, work, job.trials)
            yield from running.ended()
    finally:
        running.cancel()


def _copies() -> BaseContext:
    """Return the context of workers: copies of one process that has imported torch, which alone costs seconds.

    Where there is no fork (Windows), each imports for itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # an optimizer of torch imports its compiler, as long again
    context.set_forkserver_preload([train_job.__module__, "torch._dynamo"])
    return context


@contextlib.contextmanager
def local(processes: int) -> Iterator[Executor]:
    """Run jobs in processes of this machine, one torch thread each; one that dies is replaced."""
    from pebble import ProcessPool

    class Local:
        def __init__(self) -> None:
            self.pool = self.new_pool()

        def new_pool(self) -> Any:
            return ProcessPool(processes, initializer=prepare, context=_copies())

        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
            if not self.pool.active:  # a worker that dies between two jobs breaks the whole pool
                self.end()
                self.pool = self.new_pool()
            future: Future[Any] = self.pool.schedule(function, args=arguments)
            return future

        def end(self) -> None:
            self.pool.stop()
            self.pool.join()

    with safe_path():
        workers = Local()
        try:
            yield workers
            workers.pool.close()
        finally:
            workers.end()


def open_executor(cluster: str | None, processes: int, folder: Path) -> contextlib.AbstractContextManager[Executor]:
    """Return the executor that the command line asks for.

    Args:
        cluster: None for this machine, `tcp://...` of a Dask scheduler, or `submitit:slurm`.
        processes: of this machine.
        folder: where submitit keeps its files.
    """
    return local(processes) if cluster is None else open_cluster(cluster, folder)
