"""From an address to a cluster: the workers of a Dask scheduler, or a batch system through submitit."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Protocol

from veriformer.clusters.attempts import Executor
from veriformer.clusters.safe_path import safe_path_by_environment
from veriformer.clusters.slurm import Queue

CONNECT_SECONDS = 20.0
"""For a scheduler to answer."""

_FAREWELL_SECONDS = 5.0
"""For workers to hear that a run is over, and for a batch system to cancel what runs."""


class UncompletedJobError(Exception):
    """A job of a batch system ended without a result: its worker died; named as submitit names it."""


class ClusterError(Exception):
    """The cluster cannot be reached or used; says which and what to do."""


class Cluster(Executor, Protocol):
    """An executor with workers on other machines.

    Attributes:
        rounds: how many calls one after another are better than a long one, since what they need is kept in between.
    """

    rounds: int

    def width(self) -> int:
        """Return how many calls are worth handing over at a time."""

    def tell(self, function: Callable[..., None], /, *arguments: Any) -> None:
        """Call a function in every worker at once, beside what runs there, where the cluster can; never raises."""


@contextlib.contextmanager
def dask(address: str) -> Iterator[Cluster]:
    """Run calls on the workers of a Dask scheduler; a worker that dies costs nothing, its calls go to another.

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
        yield _Dask(client, address)
    finally:
        client.close()


class _Dask:
    rounds = 4

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self._executor = client.get_executor(pure=False)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        with self._there():
            future: Future[Any] = self._executor.submit(pickle.loads, _called_when_read(function, arguments))
        return future

    def width(self) -> int:
        """Return four calls a thread: none waits for work, and the last ones end at about the same time."""
        with self._there():
            return 4 * max(1, sum(self._client.nthreads().values()))

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        """Wait while the client looks for a scheduler that it has lost; what is handed over then would never end."""
        try:
            while self._client.status == "connecting":
                time.sleep(0.1)
            if self._client.status != "running":
                raise ConnectionError("it was lost and did not come back")
            yield
        except (OSError, TimeoutError, RuntimeError) as problem:
            line = (str(problem) or type(problem).__name__).splitlines()[0]
            raise ClusterError(
                f"the Dask scheduler at {self._address} is gone ({line}); start one again and give the same command"
            ) from None

    def tell(self, function: Callable[..., None], /, *arguments: Any) -> None:
        def run() -> None:
            with contextlib.suppress(Exception):  # the scheduler may be gone, which is why the run ends
                self._client.run(pickle.loads, _called_when_read(function, arguments), on_error="ignore")

        telling = threading.Thread(target=run, daemon=True)  # what a scheduler that hangs would keep waiting
        telling.start()
        telling.join(_FAREWELL_SECONDS)


class _Call:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._told = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._told


def _called_when_read(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return a pickle that gives, when it is read, what the function returns.

    A function that a worker cannot import ends the worker, not the call, if it is handed to Dask as it is: then all
    that is left waits for ever.
    """
    return pickle.dumps(_Call(function, arguments))


@contextlib.contextmanager
def batch_system(name: str, folder: Path, minutes: int = 60, gib: float = 0) -> Iterator[Cluster]:
    """Run calls through submitit: `slurm`, or `local` for its own processes.

    Args:
        name: of the system.
        folder: where submitit keeps its files; the workers must see it too.
        minutes: that one call may take.
        gib: memory to ask for; 0: what the system gives.

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
        batch.update_parameters(
            timeout_min=minutes, cpus_per_task=1, tasks_per_node=1, **({"mem_gb": gib} if gib else {})
        )
    except (RuntimeError, ValueError, KeyError) as problem:
        raise ClusterError(f"submitit cannot use {name!r} here: {problem}") from None
    # its loggers write to standard output, where the report goes, each time that Slurm keeps no accounts
    logging.getLogger("submitit").setLevel(logging.CRITICAL)
    jobs = _Batch(batch, Queue() if batch.cluster == "slurm" else None)
    try:
        yield jobs
    finally:
        jobs.end()


class _Batch:
    rounds = 1

    def __init__(self, batch: Any, queue: Queue | None = None) -> None:
        self._batch, self._queue = batch, queue
        self._stopped = threading.Event()
        self._followers: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        with safe_path_by_environment() as begun:
            job = self._batch.submit(begun, function, *arguments)
        future.set_running_or_notify_cancel()
        self._followers = [t for t in self._followers if t.is_alive()]
        followed = (job, future, self._stopped, self._queue)
        self._followers.append(threading.Thread(target=_follow, args=followed, daemon=True))
        self._followers[-1].start()
        return future

    def width(self) -> int:
        """Return eight: each job of a batch system waits in its queue and starts its own processes."""
        return 8

    def tell(self, function: Callable[..., None], /, *arguments: Any) -> None:
        """Do nothing: what a job has left ends with it."""

    def end(self) -> None:
        self._stopped.set()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))


def _follow(job: Any, future: Future[Any], stopped: threading.Event, queue: Queue | None = None) -> None:
    """Bring the end of a submitit job to a future; cancel the job when the run stops first."""
    while not job.done() and not (queue and queue.has_lost(job.job_id)):
        if stopped.wait(0.2):
            job.cancel()
            future.set_exception(CancelledError())
            return
        time.sleep(0)
    try:
        if not job.done():  # nor would `job.result()` end: it waits for what Slurm's accounts say
            raise UncompletedJobError(f"job {job.job_id} left the queue without a result")
        future.set_result(job.result())
    except BaseException as problem:
        future.set_exception(problem)


def open_cluster(
    address: str, folder: Path, minutes: int = 60, gib: float = 0
) -> contextlib.AbstractContextManager[Cluster]:
    """Return the cluster at an address.

    Args:
        address: `tcp://...` of a Dask scheduler, or `submitit:slurm`.
        folder: where submitit keeps its files.
        minutes: that one call may take on a batch system.
        gib: memory to ask a batch system for; 0: what it gives.

    Raises:
        ClusterError: it is no address; entering raises it where nobody answers.
    """
    if address.startswith("submitit:"):
        return batch_system(address.removeprefix("submitit:"), folder, minutes, gib)
    if "://" not in address:
        raise ClusterError(
            f"--cluster was {address!r}; it must be tcp://HOST:PORT of a Dask scheduler, or submitit:slurm"
        )
    return dask(address)
