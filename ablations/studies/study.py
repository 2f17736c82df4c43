"""A study: one base, variants with one thing changed, tasks, and what is predicted before a single run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

Changes = Mapping[str, Any]

EXPECTATIONS = ("hurts", "helps", "equivalent", "chance", "slower", "faster", "depends")
"""What a prediction may expect of a variant against the base: of accuracy, that it is at chance, of the loss area."""


@dataclass(frozen=True)
class Variant:
    """One named change.

    Attributes:
        name: as the command line knows it.
        removes: what is taken away or exchanged, in words.
        config: fields of the reference's Config (or of another model's configuration).
        recipe: fields of Recipe.
        edits: names in `veriformer.ablations.trials.edits.EDITS`, for parts that no field removes.
    """

    name: str
    removes: str = ""
    config: Changes = field(default_factory=dict)
    recipe: Changes = field(default_factory=dict)
    edits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Conditions under which base and variants are compared: a depth, a learning rate."""

    name: str = ""
    config: Changes = field(default_factory=dict)
    recipe: Changes = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """What is expected, and who says so.

    Attributes:
        variant: its name.
        expects: one of `EXPECTATIONS`.
        source: who says so, or where it was seen.
        tasks: that it speaks of; empty: all.
        settings: that it speaks of; empty: all.
        theorem: name in `veriformer.ablations.training.exactness.CHECKS`, where it follows from algebra.
    """

    variant: str
    expects: str
    source: str
    tasks: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    theorem: str = ""

    def __post_init__(self) -> None:
        if self.expects not in EXPECTATIONS:
            raise ValueError(f"a prediction expects {self.expects!r}; it must be one of {', '.join(EXPECTATIONS)}")

    def speaks_of(self, task: str, setting: str, variant: str) -> bool:
        """Return whether it is about this row."""
        return (
            variant == self.variant
            and (not self.tasks or task in self.tasks)
            and (not self.settings or setting in self.settings)
        )


@dataclass(frozen=True, kw_only=True)
class Study:
    """Base x variants x settings x tasks; the first variant is the base.

    Attributes:
        name: as the command line knows it.
        question: that it answers.
        source: where the question comes from.
        config: of the base.
        recipe: of the base.
        variants: the first is the base.
        tasks: their names.
        settings: conditions, each with its own base.
        predictions: registered before anything is run.
        lengths: other lengths at which the trained model is tried too.
        fit: name in `veriformer.ablations.statistics.fits.FITS` of what is made of the finished rows.
        skip: tells a (task, setting, variant) that makes no sense, or that is another one under a second name.
    """

    name: str
    question: str
    source: str
    config: Changes
    recipe: Recipe
    variants: tuple[Variant, ...]
    tasks: tuple[str, ...]
    settings: tuple[Setting, ...] = (Setting(),)
    predictions: tuple[Prediction, ...] = ()
    lengths: tuple[int, ...] = ()
    fit: str = ""
    skip: Callable[[str, str, str], bool] | None = None

    def rows(self) -> Iterator[tuple[str, Setting, Variant]]:
        """Yield every (task, setting, variant)."""
        for task in self.tasks:
            for setting in self.settings:
                for variant in self.variants:
                    if self.skip is None or not self.skip(task, setting.name, variant.name):
                        yield task, setting, variant

    def is_forced(self, task: str, setting: Setting, variant: Variant) -> bool:
        """Return whether a theorem settles this row."""
        return any(p.theorem and p.speaks_of(task, setting.name, variant.name) for p in self.predictions)

    def trial(self, task: str, setting: Setting, variant: Variant, seed: int, device: str = "cpu") -> Trial:
        """Return one trial; it knows nothing of the study, so that studies share what they have in common."""
        checks = tuple(
            p.theorem for p in self.predictions if p.theorem and p.speaks_of(task, setting.name, variant.name)
        )
        recipe = replace(self.recipe, **{**setting.recipe, **variant.recipe})
        return Trial(
            task=task,
            config=_for_task(task, {**self.config, **setting.config, **variant.config}, self.lengths),
            recipe=recipe,
            edits=variant.edits,
            lengths=self.lengths,
            checks=checks,
            seed=seed,
            device=device,
        )


def _for_task(name: str, config: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Add what the task fixes: architecture, vocabulary, classes, and the rows of a learned table."""
    task = TASKS[name]
    if task.model != "reference":
        return config
    fixed: dict[str, Any] = {"architecture": task.architecture, "vocab_size": task.vocab_size}
    if task.num_classes:
        fixed["num_classes"] = task.num_classes
    # tokens that the model sees: a decoder's sequence holds prompt and answer
    longest = max(task.draw(0, 2, length).inputs[0].shape[1] for length in (task.length, *lengths))
    return {"max_len": longest, **config, **fixed}


STUDIES: dict[str, Study] = {}
"""Every study by its name; a module of `veriformer.ablations.studies` adds its own."""


def register(*studies: Study) -> None:
    """Make studies known by their names."""
    for study in studies:
        if study.name in STUDIES:
            raise ValueError(f"study {study.name!r} is there already; give the new one another name")
        STUDIES[study.name] = study
