"""What the table compares: every set of parts removed, by task and depth, over one sweep that is the same for all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from veriformer.ablations.execution.plan import FIRST_SEED
from veriformer.ablations.studies.study import Setting, Study, Variant
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

PARTS: Mapping[str, Mapping[str, Any]] = {
    "positions": {"positions": "none"},
    "residual": {"residual": False},
    "LayerNorm": {"norm": "none"},
}
"""What is removed, and the fields of the reference's Config that remove it."""

QUESTION = "What is left of a Transformer without positions, residual connections, LayerNorm, each pair and all three?"

TUNING_SEED = 2**32
"""The first seed of tuning. Those of reports stay far below, so that no seed does both."""

Removed = tuple[str, ...]


def is_control(task: str) -> bool:
    """Return whether a task needs no order of its tokens."""
    return "positions" not in TASKS[task].needs


@dataclass(frozen=True)
class Point:
    """One setting of the sweep."""

    learning_rate: float
    warm_up: int
    init: str

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return f"lr={self.learning_rate:g} warm-up={self.warm_up} {self.init}"


@dataclass(frozen=True)
class Cell:
    """One row of the table: a task, a depth and the parts that are removed."""

    task: str
    num_layers: int
    removed: Removed

    @property
    def is_forced(self) -> bool:
        """Whether a theorem settles it: no model without positions can tell a sequence from its rearrangement."""
        return "positions" in self.removed and not is_control(self.task)


@dataclass(frozen=True, kw_only=True)
class Design:
    """The whole table.

    Attributes:
        config: of the model with nothing removed.
        recipe: of every trial; the sweep changes its rate and its warm-up.
        tasks: the first needs order, the others are controls.
        depths: layers N.
        rates: learning rates of the sweep.
        warm_ups: of the sweep, steps.
        inits: schemes of the initial weights of the sweep.
        tuning: seeds of every setting of the sweep that find the best and the worst.
        seeds: fresh ones that report the two.
        control_seeds: the same for a task that needs no order.
        control_steps: at most, of a trial on a task that needs no order: it is learned in a third of the others' steps.
        first_seed: of reporting.
        whole: what this is a part of, where it was cut; its tests all count.
    """

    config: Mapping[str, Any] = field(
        default_factory=lambda: {"d_model": 32, "num_heads": 2, "positions": "learned", "norm_placement": "pre"}
    )
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=150, schedule="linear"))
    tasks: tuple[str, ...] = ("precede", "count")
    depths: tuple[int, ...] = (2, 6)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    warm_ups: tuple[int, ...] = (0, 50)
    inits: tuple[str, ...] = ("default", "gpt2", "xavier")
    removed: tuple[Removed, ...] = tuple(
        chosen for number in range(len(PARTS) + 1) for chosen in itertools.combinations(PARTS, number)
    )
    tuning: int = 2
    seeds: int = 24
    control_seeds: int = 12
    control_steps: int = 100
    first_seed: int = FIRST_SEED
    whole: Design | None = None

    def __post_init__(self) -> None:
        last = self.first_seed + max(self.seeds, self.control_seeds) - 1
        if last >= TUNING_SEED:
            raise ValueError(
                f"the seeds {self.first_seed} to {last} were asked for; those from {TUNING_SEED} are for tuning, "
                "give smaller ones"
            )

    def cut(self, tasks: Sequence[str], variants: Sequence[str]) -> Design | None:
        """Return what is left with these tasks and these sets of removed parts alone, against nothing removed.

        Args:
            tasks: names; empty: all.
            variants: parts joined by "+"; empty: all.
        """
        kept = tuple(t for t in self.tasks if not tasks or t in tasks)
        removed = tuple(r for r in self.removed if not r or not variants or "+".join(r) in variants)
        return replace(self, tasks=kept, removed=removed, whole=self.whole or self) if kept else None

    def points(self) -> tuple[Point, ...]:
        """Return every setting of the sweep."""
        return tuple(itertools.starmap(Point, itertools.product(self.rates, self.warm_ups, self.inits)))

    def cells(self) -> tuple[Cell, ...]:
        """Return every row; where nothing is removed comes first in each task and depth."""
        return tuple(itertools.starmap(Cell, itertools.product(self.tasks, self.depths, self.removed)))

    def tuning_seeds(self) -> range:
        """Return the seeds that choose."""
        return range(TUNING_SEED, TUNING_SEED + self.tuning)

    def reporting_seeds(self, cell: Cell) -> range:
        """Return the seeds that report a row: what a theorem settles has one for each setting of the sweep."""
        number = self.control_seeds if is_control(cell.task) else self.seeds
        return range(self.first_seed, self.first_seed + (min(number, len(self.points())) if cell.is_forced else number))

    def recipe_of(self, task: str) -> Recipe:
        """Return how a task is trained, but for what the sweep changes."""
        steps = min(self.recipe.steps, self.control_steps) if is_control(task) else self.recipe.steps
        return replace(self.recipe, steps=steps)

    def trial(self, cell: Cell, point: Point, seed: int, device: str) -> Trial:
        """Return one trial of a row."""
        changes = {name: value for part in cell.removed for name, value in PARTS[part].items()}
        config = {**self.config, "num_layers": cell.num_layers, "init": point.init, **changes}
        recipe = replace(self.recipe_of(cell.task), learning_rate=point.learning_rate, warm_up=point.warm_up)
        as_study = Study(
            name="table", question="", source="", config=config, recipe=recipe, variants=(Variant(""),),
            tasks=(cell.task,),
        )  # fmt: skip
        trial = as_study.trial(cell.task, Setting(), as_study.variants[0], seed, device)
        return replace(trial, checks=("permutation",)) if cell.is_forced else trial
