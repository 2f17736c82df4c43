"""What `pytest` alone runs: the verification, each property shown failing once, what holds the house together, and of
every other file its first test.

`--whole` runs all, and so does whoever names files, words (`-k`) or marks (`-m`): these choose by themselves.
"""

from __future__ import annotations

import pytest

ALONE = (
    "tests/verification/", "tests/reference/", "tests/reports/", "tests/properties/known/", "tests/properties/judging/",
    "tests/properties/power/", "tests/properties/probes/", "tests/ablations/test_statistics.py",
    "tests/ablations/test_tasks.py", "tests/ablations/test_verdicts.py", "tests/test_",
)  # fmt: skip
"""Where the tests stand that run: of subjects shipped here, of what judges them, of the statistics, of the folders."""

FAULTS = "tests/zoo/test_mutants.py::test_fault_is_noticed["
LONG = (
    "tests/test_examples.py",  # each example is installed into an environment of its own
    f"{FAULTS}BK04-compile]",  # torch's compiler starts from nothing
    "tests/cli/test_ablate.py", "tests/cli/test_cluster.py",  # processes are killed and started anew
    "tests/hostile/test_runaways.py", "tests/properties/test_plugin.py", "tests/test_extras.py",  # they wait for others
    "tests/hostile/test_fuzz.py",  # commands by the dozen
    "tests/properties/bench/test_out_of_bounds.py", "tests/properties/twin/test_louder.py",  # whole checks
)  # fmt: skip


def chooses(config: pytest.Config) -> bool:
    """Whether a run is of the tests that pytest finds by itself, and nobody said which of them."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return not (named or config.option.whole or config.option.keyword or config.option.markexpr)


def shown_failing() -> set[str]:
    """Return few faults that show every property of the catalogue failing once: always the one that shows most more."""
    from veriformer.tests.mutants import all_faults

    faults = all_faults().values()
    rest = {killer for fault in faults for killer in fault.killed_by}
    chosen: set[str] = set()
    while rest:
        most = max(faults, key=lambda fault: len(rest.intersection(fault.killed_by)))
        rest.difference_update(most.killed_by)
        chosen.add(f"{FAULTS}{most.id}]")
    return chosen


def left_to_the_whole(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return those of the tests that `pytest` alone does not run: of every other file it runs the first."""
    chosen = shown_failing()
    files: set[str] = set()
    left = []
    for item in items:
        file = item.nodeid.partition("::")[0]
        alone = not item.nodeid.startswith(LONG) and (
            item.nodeid.startswith(ALONE) or item.nodeid in chosen or file not in files
        )
        files.add(file)
        if not alone:
            left.append(item)
    return left
