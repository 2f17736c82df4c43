"""`--cluster`: the same option for every command that judges."""

from __future__ import annotations

from pathlib import Path

import click

from veriformer.cli.processes.elsewhere import Elsewhere, minutes_of
from veriformer.clusters.opening import open_cluster

_OWN_GIB = 2.0  # of the processes of a job that judge nothing themselves

cluster_option = click.option(
    "--cluster", metavar="ADDRESS",
    help="judge on the workers of a Dask scheduler, tcp://HOST:PORT, or in jobs of submitit:slurm; -n: jobs at a time",
)  # fmt: skip


def workers_of(cluster: str, at_once: int | None, *, seconds: float, max_memory: float = 0, folder: Path) -> Elsewhere:
    """Return the workers of a cluster, until the command of this context has ended.

    Args:
        cluster: its address.
        at_once: jobs at a time; None: what the cluster finds worth while.
        seconds: limit for one judgement.
        max_memory: GiB of one process that judges; 0 for no limit.
        folder: where submitit keeps its files.

    Raises:
        ClusterError: nobody answers at the address.
    """
    context = click.get_current_context()
    gib = max_memory and max_memory + _OWN_GIB
    opened = open_cluster(cluster, folder / "submitit", minutes_of(seconds), gib)
    workers = Elsewhere(context.with_resource(opened), at_once)
    context.call_on_close(workers.leave)
    return workers
