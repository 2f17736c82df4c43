"""A study: one base, variants with one thing changed, tasks, and what is predicted before a single run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from torch import nn

from veriformer.ablations.tasks import TASKS, Task
from veriformer.ablations.trials.own import Edit, Parts, Place, Source, plain
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

Changes = Mapping[str, Any]

EXPECTATIONS = ("hurts", "helps", "equivalent", "alike", "chance", "slower", "faster")
"""What a prediction may expect of a variant against the base: of accuracy, that it is at chance, of the loss area.

Each can turn out wrong. *alike* speaks of seeds that live, as papers that compare finished runs do; *equivalent* of the
mean over all seeds, which takes some hundred of them."""


@dataclass(frozen=True)
class Variant:
    """One named change.

    Attributes:
        name: as the command line knows it.
        removes: what is taken away or exchanged, in words.
        config: fields of the reference's Config (or of another model's configuration).
        recipe: fields of Recipe.
        edits: names in `veriformer.ablations.trials.edits.EDITS`, for parts that no field removes; in a study of one's
            own also functions that change the built model in place.
        build: makes this variant's model, in a study of one's own; None: the study's.
        optimizer: makes this variant's optimizer from the model, in a study of one's own; None: the study's.
    """

    name: str
    removes: str = ""
    config: Changes = field(default_factory=dict)
    recipe: Changes = field(default_factory=dict)
    edits: tuple[str | Edit, ...] = ()
    build: Callable[..., nn.Module] | None = None
    optimizer: Callable[[nn.Module], Any] | None = None


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
        source: who says so.
        tasks: that it speaks of; empty: all.
        settings: that it speaks of; empty: all.
        theorem: name in `veriformer.ablations.training.exactness.CHECKS`, where it follows from algebra.
        registered: date, YYYY-MM-DD, at which it was written down; it must not be later than the run, and the seeds
            of the run must be others than those that were seen before.
    """

    variant: str
    expects: str
    source: str
    tasks: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    theorem: str = ""
    registered: str = ""

    def __post_init__(self) -> None:
        if self.expects not in EXPECTATIONS:
            raise ValueError(f"a prediction expects {self.expects!r}; it must be one of {', '.join(EXPECTATIONS)}")
        if self.registered and not _is_date(self.registered):
            raise ValueError(f"a prediction was registered {self.registered!r}; a date like 2026-11-22 is required")

    def speaks_of(self, task: str, setting: str, variant: str) -> bool:
        """Return whether it is about this row."""
        return (
            variant == self.variant
            and (not self.tasks or task in self.tasks)
            and (not self.settings or setting in self.settings)
        )


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class Expectation:
    """What is expected of a quantity beside accuracy: of what the study's `fit` finds.

    Attributes:
        about: the quantity, as the fit calls it in `found`.
        low: the least value expected.
        high: the largest.
        source: who says so.
        registered: date, YYYY-MM-DD, at which it was written down.
    """

    about: str
    low: float
    high: float
    source: str
    registered: str = ""

    def __post_init__(self) -> None:
        if self.registered and not _is_date(self.registered):
            raise ValueError(f"an expectation was registered {self.registered!r}; a date like 2026-11-22 is required")

    def outcome(self, found: Sequence[float | None] | None) -> str:
        """Return what becomes of it, from a value and its interval; an end that is None is infinite.

        >>> Expectation("slope", 0.0, 1.0, "a book").outcome([0.5, 0.2, 0.9])
        'confirmed'
        """
        if found is None or found[0] is None:
            return "undecided"
        low = -math.inf if found[1] is None else found[1]
        high = math.inf if found[2] is None else found[2]
        if self.low <= low and high <= self.high:
            return "confirmed"
        return "contradicted" if high < self.low or low > self.high else "undecided"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Base x variants x settings x tasks; the first variant is the base.

    A study of one's own names `build`, and tasks that are `Task`s of one's own or names of those that are there. It is
    run by `veriformer ablate path/study.py:study`, whose processes import the file: lambdas and closures are welcome.

    Attributes:
        name: as the command line knows it: letters, digits, - and _.
        question: that it answers.
        source: where the question comes from.
        config: of the base: keyword arguments of the reference's Config, or of `build`.
        recipe: of the base; fields of Recipe may be given as a dictionary.
        variants: the first is the base.
        tasks: their names, or `Task`s; a single one needs no tuple.
        settings: conditions, each with its own base.
        predictions: registered before anything is run.
        lengths: other lengths at which the trained model is tried too.
        fit: name in `veriformer.ablations.statistics.answers.ANSWERS` of what is made of the finished rows.
        expectations: of what the fit finds, registered likewise.
        checks: theorems that are verified on every trained model though they settle no accuracy.
        heads: whether each attention head is taken out in turn after training.
        skip: tells a (task, setting, variant) that makes no sense, or that is another one under a second name.
        whole: of which this is a part; None: this is all of it.
        build: makes a model, called with the configuration of the row and, where it takes them, `vocab_size`,
            `num_classes` and `max_len` of the task. Its random numbers are seeded by the trial. None: the reference.
        optimizer: `(model)` to an optimizer; the recipe's warm-up and schedule then scale its own rates. None: AdamW.
        step: `(model, optimizer, batch)` to the loss: a whole training step. None: loss, backward, clip, step.
        files: beside the code, what the outcome depends on (a configuration, weights): paths from the study's folder.
        own_tasks: tasks of one's own by name, taken from `tasks`.
        code: where the study was loaded from; set by whoever loads it.

    Raises:
        ValueError: there are no variants, two have one name, a task is not known, or the name is none for a file.
    """

    name: str
    question: str = ""
    source: str = ""
    config: Changes = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)
    variants: tuple[Variant, ...]
    tasks: tuple[str, ...]
    settings: tuple[Setting, ...] = (Setting(),)
    predictions: tuple[Prediction, ...] = ()
    lengths: tuple[int, ...] = ()
    fit: str = ""
    expectations: tuple[Expectation, ...] = ()
    checks: tuple[str, ...] = ()
    heads: bool = False
    skip: Callable[[str, str, str], bool] | None = None
    whole: Study | None = None
    build: Callable[..., nn.Module] | None = None
    optimizer: Callable[[nn.Module], Any] | None = None
    step: Callable[..., Any] | None = None
    files: tuple[str, ...] = ()
    own_tasks: Mapping[str, Task] = field(default_factory=dict)
    code: Source | None = None

    if TYPE_CHECKING:  # what may be given is wider than what is kept

        def __init__(
            self, *, name: str, variants: Iterable[Variant], tasks: str | Task | Iterable[str | Task],
            question: str = "", source: str = "", config: Changes = ..., recipe: Recipe | Changes = ...,
            settings: Iterable[Setting] = ..., predictions: Iterable[Prediction] = (), lengths: Iterable[int] = (),
            fit: str = "", skip: Callable[[str, str, str], bool] | None = None,
            build: Callable[..., nn.Module] | None = None, optimizer: Callable[[nn.Module], Any] | None = None,
            step: Callable[..., Any] | None = None, files: Iterable[str] = (),
            own_tasks: Mapping[str, Task] = ..., code: Source | None = None, expectations: Iterable[Expectation] = (),
            checks: Iterable[str] = (), heads: bool = False, whole: Study | None = None,
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        from veriformer.ablations.studies.wording import normalised

        for name, value in normalised(self).items():
            object.__setattr__(self, name, value)

    @property
    def is_own(self) -> bool:
        """Whether it trains a model, data or steps of somebody's own."""
        return any((self.build, self.optimizer, self.step, self.own_tasks)) or any(
            v.build or v.optimizer or any(callable(e) for e in v.edits) for v in self.variants
        )

    def task(self, name: str) -> Task:
        """Return one of its tasks."""
        return self.own_tasks[name] if name in self.own_tasks else TASKS[name]

    def parts(self, task: str, setting: str, variant: str) -> Parts:
        """Return what a row of an own study is made of."""
        of = next(s for s in self.settings if s.name == setting)
        it = next(v for v in self.variants if v.name == variant)
        return Parts(
            task=self.task(task),
            config={**self.config, **of.config, **it.config},
            build=it.build or self.build,
            edits=it.edits,
            optimizer=it.optimizer or self.optimizer,
            step=self.step,
        )

    def cut(self, tasks: Sequence[str] = (), variants: Sequence[str] = ()) -> Study | None:
        """Return these tasks and variants of it (empty: all) with the base, or None where no task is left.

        The part stays in the family of tests of the whole: to look at fewer rows makes none of them more certain.
        """
        kept = tuple(task for task in self.tasks if not tasks or task in tasks)
        base, *others = self.variants
        chosen = (base, *(v for v in others if not variants or v.name in variants))
        if not kept:
            return None
        if (kept, chosen) == (self.tasks, self.variants):
            return self
        return replace(self, tasks=kept, variants=chosen, whole=self.whole or self)

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
        told = [p.theorem for p in self.predictions if p.theorem and p.speaks_of(task, setting.name, variant.name)]
        checks = tuple(dict.fromkeys([*told, *self.checks]))
        recipe = replace(self.recipe, **{**setting.recipe, **variant.recipe})
        config = {**self.config, **setting.config, **variant.config}
        own = None
        if self.code is not None:
            own = Place(source=self.code, study=self.name, setting=setting.name, variant=variant.name)
        return Trial(
            task=task,
            config=_for_task(task, config, self.lengths) if own is None else plain(config),
            recipe=recipe,
            edits=tuple(e if isinstance(e, str) else plain(e) for e in variant.edits),
            lengths=self.lengths,
            checks=checks,
            heads=self.heads,
            seed=seed,
            device=device,
            own=own,
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
