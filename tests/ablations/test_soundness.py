"""What is said of a study whose seeds are no sample, or whose test is none; and what is not said of sound ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.ablations import Recipe, Study, Task, Variant
from veriformer.ablations.training.own.soundness import soundness
from veriformer.ablations.trials.own import LOADED, Loaded, Parts, Source, parts_of
from veriformer.ablations.trials.trial import Trial
from veriformer.ablations.verdicts.learning import of_the_curves
from veriformer.ablations.verdicts.notes import notes
from veriformer.ablations.verdicts.rows import Row

RANDOM = torch.Generator().manual_seed(5)
X = torch.randn(250, 4, generator=RANDOM)
Y = (X.sum(1) > 0).long()


def known(study: Study) -> Study:
    """Return the study as if it had been loaded from a file."""
    study = replace(study, code=Source(target="sound.py:study", files=(("sound.py", ""),)))
    LOADED["sound.py:study", study.name] = Loaded(study)
    return study


def drawn(seed: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed * 1009 + step))
    return x, (x.sum(1) > 0).long()


def as_documented(seed: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * seed + step))
    return x, (x.sum(1) > 0).long()


def of_no_seed(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return drawn(3, step)


def global_draws(seed: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4)
    return x, (x.sum(1) > 0).long()


class Kept:
    """Data that go on where they were."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return drawn(seed, self.asked)


class Seeded(nn.Module):
    """A model that seeds all generators where it is built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1337)
        self.map = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.map(x)
        return made


def questions(build: Any = lambda: nn.Linear(4, 2), **task: Any) -> list[str]:
    given = {"name": "sign", "chance": 0.5} | task
    study = known(Study(name="s", build=build, recipe=Recipe(steps=2), tasks=[Task(**given)], variants=[Variant("a")]))
    one, two = (trial_of(study, seed) for seed in (0, 1))
    parts: Parts = parts_of(one)
    return soundness(parts, one, two)


def trial_of(study: Study, seed: int) -> Trial:
    ((task, setting, variant),) = study.rows()
    return study.trial(task, setting, variant, seed)


@pytest.mark.parametrize(
    "task",
    [
        {"data": drawn},
        {"data": as_documented},
        {"data": global_draws},  # the generators are seeded before it is asked
        {"data": (X, Y)},
        {"data": (X[:190], Y[:190]), "held_out": (X[190:], Y[190:])},
        {"data": [(X[:20], Y[:20]), (X[20:50], Y[20:50])], "held_out": [(X[50:], Y[50:])]},
    ],
)
def test_nothing_is_said_of_sound_data(task: dict[str, Any]) -> None:
    assert questions(**task) == []


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"data": of_no_seed}, "sign gives every seed the same data"),
        ({"data": Kept()}, "sign gave other data when it was asked again for the same seed"),
        ({"data": (X, Y), "held_out": (X[50:], Y[50:])}, "91% of the held-out samples that were compared"),
        (
            {"data": (X[:240], Y[:240]), "held_out": (X[200:], Y[200:])},
            "74% of the held-out samples that were compared",
        ),
    ],
)
def test_data_of_no_seed_or_no_test_is_named(task: dict[str, Any], words: str) -> None:
    steps = Recipe(steps=2).batch_size * 8
    assert steps > len(X), "all of it is compared"
    assert any(words in line for line in questions(**task)), questions(**task)


def test_weights_that_no_seed_enters_are_named() -> None:
    (line,) = questions(build=Seeded, data=drawn)
    assert line.startswith("every seed starts with the same weights")
    frozen = nn.Linear(4, 2)
    nn.init.zeros_(frozen.weight)
    nn.init.zeros_(frozen.bias)
    assert questions(build=lambda: frozen, data=drawn) == [], "zeros are nobody's draw"


def row(values: list[float], base: list[float] | None, **task: Any) -> Row:
    def records(of: list[float]) -> list[dict[str, Any]]:
        return [{"accuracy": v, "loss": v, "loss_area": v, "max_loss": v} for v in of]

    given = {"name": "sign", "data": drawn, "chance": 0.5} | task
    return Row(Task(**given), "", "base" if base is None else "other", records(values),
               None if base is None else records(base), is_forced=False)  # fmt: skip


def said_of(*rows: Row) -> str:
    study = known(
        Study(name="s", build=lambda: nn.Linear(4, 2), recipe=Recipe(steps=2), tasks=[rows[0].task],
              variants=[Variant("base"), Variant("other")])
    )  # fmt: skip
    return "\n".join(notes(study, rows))


def test_where_all_are_as_good_as_can_be_it_is_said() -> None:
    assert "as good as can be" in said_of(row([1.0, 0.9995], None), row([0.9998, 1.0], [1.0, 0.9995]))
    assert "as good as can be" not in said_of(row([1.0, 1.0], None), row([0.9, 1.0], [1.0, 1.0]))


def per_cent(model: nn.Module, batch: Any) -> Tensor:
    return 100 * (model(batch[0]).argmax(-1) == batch[1]).float().mean()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def test_a_metric_beyond_the_best_is_named() -> None:
    metric = {"metric": per_cent, "loss": loss, "best": 1.0}
    told = said_of(row([90.0, 97.0], None, **metric), row([80.0, 91.0], [90.0, 97.0], **metric))
    assert "has per cent 97, beyond the best that the task names, 1" in told
    assert "as good as can be" not in told
    assert "beyond" not in said_of(row([0.9, 1.01], None, **metric), row([0.8, 1.0], [0.9, 1.01], **metric))


def rare(seed: int, step: int) -> tuple[Tensor, Tensor]:
    x, _ = drawn(seed, step)
    return x, (x.sum(1) > 3.5).long()


class Dropping(nn.Module):
    """A model that drops in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.map(functional.dropout(x))
        return made


def test_what_the_metric_is_measured_on_is_told() -> None:
    assert any(
        "measured on 4 held-out samples" in q for q in questions(data=(X[:200], Y[:200]), held_out=(X[-4:], Y[-4:]))
    )
    assert any("the most frequent label 0, is right in 9" in q for q in questions(data=rare))
    few = {"data": drawn, "chance": 0.9}
    assert any("chance is given as 0.9, and no constant answer is right in over 5" in q for q in questions(**few))
    assert any("when it is evaluated again" in q for q in questions(build=Dropping, data=drawn))


class Scaled(nn.Module):
    """A map with a scale of its own."""

    def __init__(self, width: int = 4, form: str = "relu") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)
        self.scale, self.form = nn.Parameter(torch.ones(width)), form

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(getattr(torch, self.form)(self.up(x)) * self.scale)
        return made


def maps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for n, p in model.named_parameters() if n != "scale"], lr=0.1)


def every(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def beside(variant: Variant, **given: Any) -> str:
    study = Study(name="beside", build=Scaled, tasks=Task(name="sign", data=drawn, chance=0.5), recipe=Recipe(steps=2),
                  variants=[Variant("base"), variant], **given)  # fmt: skip
    study = known(study)
    pair = [replace(row([0.7, 0.8], None if v == "base" else [0.7, 0.8]), variant=v) for v in ("base", variant.name)]
    return "\n".join(notes(study, pair))


def test_what_else_differs_is_told() -> None:
    assert "3.67 times more parameters than the base, 76 against 18" not in beside(
        Variant("tanh", config={"form": "tanh"})
    )
    assert "times more parameters than the base" in beside(Variant("wide", config={"width": 16}))
    other = Variant("tanh", config={"form": "tanh"}, recipe=Recipe(steps=9))
    assert "tanh: its recipe differs from the base's, besides its other change: steps 9 against 2" in beside(other)
    both = Variant("tanh", config={"form": "tanh"}, optimizer=every)
    assert "Adam (lr 0.01, betas (0.9, 0.999)) against SGD (lr 0.1)" in beside(both, optimizer=maps)
    alone = Variant("adam", optimizer=every)
    assert "its optimizer differs" not in beside(alone, optimizer=maps), "that is its change"
    assert "base: scale: never trained, since the optimizer is not given it" in beside(alone, optimizer=maps)


def curve(losses: list[float], metrics: list[float]) -> dict[str, Any]:
    return {"accuracy": metrics[-1], "loss": losses[-1], "loss_area": 1.0, "max_loss": losses[0],
            "curves": {"loss": losses, "held_out_accuracy": metrics}}  # fmt: skip


def of_curves(losses: list[float], metrics: list[float], **task: Any) -> str:
    given = Task(**{"name": "sign", "data": drawn, "chance": 0.5} | task)
    return "\n".join(of_the_curves(Row(given, "", "base", [curve(losses, metrics)] * 3, None, is_forced=False)))


def test_what_the_curves_say_is_told() -> None:
    falling, settled = [20 - i / 2 for i in range(20)], [10 * 0.5**i for i in range(20)]
    assert "the loss was still falling when training ended, by 2" in of_curves(falling, [0.5, 0.7])
    assert of_curves(settled, [0.5, 0.8]) == ""
    assert "the base itself is at chance in 3 of 3 seeds" in of_curves(settled, [0.5, 0.5])
    metric: dict[str, Any] = {"metric": per_cent, "loss": loss, "chance": float("nan")}
    assert "is it an error? (lower_is_better=True)" in of_curves(settled, [5.0, 0.1], **metric)
    assert of_curves(settled, [0.1, 5.0], **metric) == ""
    assert "is it an error? (lower_is_better=False)" in of_curves(settled, [0.1, 5.0], **metric, lower_is_better=True)


def test_a_name_becomes_that_of_files() -> None:
    study = Study(name="five symbols <b>", build=Scaled, tasks=Task(name="t", data=drawn), variants=[Variant("a")])
    assert study.name == "five-symbols-b"
    with pytest.raises(ValueError, match="must have 1 to 60 letters"):
        Study(name="<>", build=Scaled, tasks=Task(name="t", data=drawn), variants=[Variant("a")])
