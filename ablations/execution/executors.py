"""Where jobs run: processes of this machine, a Dask cluster, or a batch system through submitit. One door for all.

An executor is anything with `submit(function, *arguments)` that returns a `concurrent.futures.Future`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol

from veriformer.ablations.execution.plan import Job
from veriformer.ablations.execution.work import prepare, train_job

ATTEMPTS = 3
"""Times a job is begun when workers die under it, before it counts as the cause of their deaths."""


CONNECT_SECONDS = 20.0
"""For a scheduler to answer."""


class Executor(Protocol):
    """What a job is handed to."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin a call elsewhere."""


class ClusterError(Exception):
    """The cluster cannot be reached or used; says which and what to do."""


def run_jobs(
    executor: Executor, jobs: Sequence[Job], *, ahead: int
) -> Iterator[tuple[Job, dict[str, Any] | BaseException]]:
    """Yield each job as it ends, with what its worker returned or why it failed.

    Args:
        executor: where they run.
        jobs: in the order in which they are begun.
        ahead: jobs handed over at a time, so that a stop has little to cancel.
    """
    waiting, running = list(reversed(jobs)), dict[Future[Any], tuple[Job, int]]()
    try:
        while waiting or running:
            while waiting and len(running) < ahead:
                job = waiting.pop()
                running[executor.submit(train_job, job.trials)] = (job, 1)
            # a limit, so that Ctrl-C is heard where a wait without one would not be interrupted
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                job, attempt = running.pop(future)
                problem = _problem(future)
                if problem is not None and _is_death(problem) and attempt < ATTEMPTS:
                    running[executor.submit(train_job, job.trials)] = (job, attempt + 1)
                else:
                    yield job, future.result() if problem is None else problem
    finally:
        for future in running:
            future.cancel()


def _problem(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as cancelled:
        return cancelled


def _is_death(problem: BaseException) -> bool:
    """Return whether the worker died, rather than the trial failing in it."""
    deaths = ("ProcessExpired", "BrokenProcessPool", "KilledWorker", "CancelledError", "UncompletedJobError")
    return type(problem).__name__ in deaths


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

    workers = Local()
    try:
        yield workers
        workers.pool.close()
    finally:
        workers.end()


@contextlib.contextmanager
def dask(address: str) -> Iterator[Executor]:
    """Run jobs on the workers of a Dask scheduler; a worker that dies costs nothing, its jobs go to another.

    Raises:
        ClusterError: distributed is not installed, or nobody answers at the address.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ClusterError("--cluster needs Dask; install it with: pip install 'veriformer[cluster]'") from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ClusterError(
            f"no Dask scheduler answers at {address} ({reason}); "
            "start one with `dask scheduler` and give the address it prints"
        ) from None
    try:
        yield client.get_executor(pure=False)
    finally:
        client.close()


@contextlib.contextmanager
def batch_system(name: str, folder: Path) -> Iterator[Executor]:
    """Run jobs through submitit: `slurm`, or `local` for its own processes.

    Raises:
        ClusterError: submitit is not installed, or does not know the system.
    """
    try:
        import submitit
    except ImportError:
        raise ClusterError(
            "--cluster submitit needs submitit; install it with: pip install 'veriformer[cluster]'"
        ) from None
    try:
        batch = submitit.AutoExecutor(folder=folder, cluster=name)
        batch.update_parameters(timeout_min=60, cpus_per_task=1, tasks_per_node=1)
    except (RuntimeError, ValueError, KeyError) as problem:
        raise ClusterError(f"submitit cannot use {name!r} here: {problem}") from None
    stopped = threading.Event()

    class Batch:
        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
            job, future = batch.submit(function, *arguments), Future[Any]()
            future.set_running_or_notify_cancel()
            threading.Thread(target=_follow, args=(job, future, stopped), daemon=True).start()
            return future

    try:
        yield Batch()
    finally:
        stopped.set()


def _follow(job: Any, future: Future[Any], stopped: threading.Event) -> None:
    """Bring the end of a submitit job to a future; cancel the job when the run stops first."""
    while not job.done():
        if stopped.wait(0.2):
            job.cancel()
            future.set_exception(CancelledError())
            return
        time.sleep(0)
    try:
        future.set_result(job.result())
    except BaseException as problem:
        future.set_exception(problem)


def open_executor(cluster: str | None, processes: int, folder: Path) -> contextlib.AbstractContextManager[Executor]:
    """Return the executor that the command line asks for.

    Args:
        cluster: None for this machine, `tcp://...` of a Dask scheduler, or `submitit:slurm`.
        processes: of this machine.
        folder: where submitit keeps its files.
    """
    if cluster is None:
        return local(processes)
    if cluster.startswith("submitit:"):
        return batch_system(cluster.removeprefix("submitit:"), folder)
    if "://" not in cluster:
        raise ClusterError(
            f"--cluster was {cluster!r}; it must be tcp://HOST:PORT of a Dask scheduler, or submitit:slurm"
        )
    return dask(cluster)
