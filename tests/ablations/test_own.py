"""Somebody's own model: any data, loss, metric, optimizer and step; stacked and alone; what its code raises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from veriformer.ablations import Prediction, Recipe, Study, Task, Variant
from veriformer.ablations.execution.plan import Grouping
from veriformer.ablations.execution.store import Store
from veriformer.ablations.running import Run
from veriformer.ablations.tasks.batches import batches, held_out
from veriformer.ablations.training.observation import norms_by_part
from veriformer.ablations.training.own.blame import OwnCodeError
from veriformer.ablations.training.own.loop import train_own
from veriformer.ablations.training.own.stackability import why_apart
from veriformer.ablations.trials.own import LOADED, Loaded, Source
from veriformer.ablations.trials.trial import Trial
from veriformer.reports.ablation_figures import curves


class Here:
    """An executor that works at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as problem:
            future.set_exception(problem)
        return future


class Net(nn.Module):
    """Tokens to classes, by attention without anything."""

    def __init__(self, vocab_size: int = 8, num_classes: int = 2, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            q = block(x)[:, None]
            x = x + functional.scaled_dot_product_attention(q, q, q)[:, 0]
        return self.out(self.drop(x.mean(dim=1)))


FILES = itertools.count()


def known(study: Study, digest: str = "") -> Study:
    """Return the study as if it had been loaded from a file, a new one for each unless its digest is given."""
    code = Source(target="here.py:study", files=(("here.py", digest or str(next(FILES))),))
    study = replace(study, code=code)
    LOADED["here.py:study", study.name] = Loaded(study)
    return study


def trial(study: Study, row: int = 0, seed: int = 0) -> Trial:
    study = known(study) if study.code is None else study
    task, setting, variant = list(study.rows())[row]
    return study.trial(task, setting, variant, seed)


def own(**given: Any) -> Study:
    usual: dict[str, Any] = {
        "name": "mine", "build": Net, "tasks": "first", "recipe": Recipe(steps=4), "variants": [Variant("base")]
    }  # fmt: skip
    return Study(**{**usual, **given})


def draw(seed: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(8, (16, 6))
    return x, (x[:, 0] > 3).long()


def regress(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0])[:, 0], batch[1].float())


MINE = Task(name="mine", data=draw)
SETS = TensorDataset(*draw(0, 0))

DATA: dict[str, Task] = {
    "function of seed and step": MINE,
    "function of the seed": Task(name="t", data=lambda seed: [draw(seed, i) for i in range(2)], held_out=[draw(0, 0)]),
    "generator": Task(name="t", data=lambda seed: (draw(seed, i) for i in range(2))),
    "tensors": Task(name="t", data=SETS.tensors, held_out=SETS.tensors),
    "list": Task(name="t", data=[draw(0, 0), draw(0, 1)], held_out=[draw(0, 2)]),
    "loader": Task(name="t", data=DataLoader(SETS, batch_size=5, shuffle=True), held_out=DataLoader(SETS)),
    "loader with workers": Task(name="t", data=DataLoader(SETS, batch_size=5, num_workers=2), held_out=SETS),
    "loader with a generator": Task(
        name="t", held_out=SETS, data=DataLoader(SETS, batch_size=5, shuffle=True, generator=torch.Generator())
    ),
    "dataset": Task(name="t", data=SETS, held_out=SETS),
}


@pytest.mark.parametrize("name", DATA)
def test_data_is_a_function_of_the_seed_whatever_a_model_draws_between(name: str) -> None:
    def five(seed: int, noise: Callable[[], object]) -> list[Any]:
        found = []
        for batch in itertools.islice(batches(DATA[name], seed, 4), 5):
            found.append(batch)
            noise()
        return found

    before = torch.random.get_rng_state()
    first, again = five(3, lambda: None), five(3, lambda: None)
    assert torch.equal(before, torch.random.get_rng_state()), "the data drew from the model's random numbers"
    noisy = five(3, lambda: torch.rand(3))
    for a, b, c in zip(first, again, noisy, strict=True):
        assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(a, b, c, strict=True))
    if "list" not in name and name != "loader with workers":  # those have one order for all
        other = five(4, lambda: None)
        assert any(not torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    assert sum(len(batch[0]) for batch in held_out(DATA[name])) >= 16


@pytest.mark.parametrize("name", DATA)
def test_every_kind_of_data_trains(name: str) -> None:
    (record,) = train_own([trial(own(tasks=DATA[name]))])
    assert 0 <= record["accuracy"] <= 1
    assert len(record["curves"]["held_out_accuracy"]) == 5


def test_held_out_batches_of_a_function_come_from_a_seed_of_their_own() -> None:
    asked: list[int] = []

    def data(seed: int, step: int) -> tuple[Tensor, Tensor]:
        asked.append(seed)
        return draw(seed, step)

    train_own([trial(own(tasks=Task(name="t", data=data)), seed=7)])
    assert len(set(asked)) == 2
    assert max(asked) > 10**9
    assert 7 in asked


@pytest.mark.parametrize("task", ["first", "mine"])
def test_stacked_and_alone_give_the_same(task: str) -> None:
    study = known(own(tasks=MINE if task == "mine" else "first", recipe=Recipe(steps=20, clip=1.0, learning_rate=3e-3)))
    trials = [trial(study, seed=seed) for seed in range(3)]
    assert why_apart(trials[0]) == ""
    together = train_own(trials)
    alone = [train_own([t])[0] for t in trials]
    assert [r["stack"] for r in together] == [3, 3, 3]
    assert [r["stack"] for r in alone] == [1, 1, 1]
    for a, b in zip(together, alone, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["curves"]["loss"] == pytest.approx(b["curves"]["loss"], rel=1e-3, abs=1e-4)
        assert a["curves"]["gradient_norm"].keys() == b["curves"]["gradient_norm"].keys()
        for part, norms in a["curves"]["gradient_norm"].items():
            assert norms == pytest.approx(b["curves"]["gradient_norm"][part], rel=1e-2, abs=1e-5)
        assert a["curves"]["entropy"][0] == b["curves"]["entropy"][0]
    assert together[0]["loss"] != together[1]["loss"]


class Switching(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (2.0 if self.out.weight.sum() > 0 else 1.0)


class Mixing(Net):
    """Computes another thing under vmap than without."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1.1 if torch._C._functorch.maybe_current_level() is not None else 1.0)


APART: dict[str, tuple[dict[str, Any], str]] = {
    "buffers": ({"build": lambda **sizes: nn.Sequential(Net(num_classes=4, vocab_size=8), nn.BatchNorm1d(4))},
                "its buffers change while it trains"),
    "branches": ({"build": Switching}, "vmap cannot train it"),
    "another result": ({"build": Mixing}, "stacked and alone"),
    "optimizer": ({"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}, "optimizer of its own"),
    "step": ({"step": lambda model, optimizer, batch: 0.0}, "training step of its own"),
    "size": ({"build": lambda: Net(width=800)}, "more than 1,000,000 parameters"),
    "shapes": ({"tasks": Task(name="t", data=lambda seed, step: tuple(x[: 8 + seed % 2] for x in draw(seed, step)))},
               "differ in structure or shape"),
    "words": ({"tasks": Task(name="t", data=lambda seed, step: {"tokens": draw(0, 0)[0], "id": "x"},
                             loss=lambda model, batch: model(batch["tokens"]).sum())}, "what is no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_does_not_stack_is_trained_one_by_one_and_says_why(name: str) -> None:
    given, why = APART[name]
    study = known(own(**given))
    assert why in why_apart(trial(study))
    jobs = Grouping().jobs(study, *next(study.rows()), 2)
    assert [len(job.trials) for job in jobs] == [1, 1]
    assert not jobs[0].trials[0].stacked
    assert train_own(jobs[1].trials)[0]["stack"] == 1


def test_a_stack_that_breaks_on_the_way_goes_on_one_by_one() -> None:
    def data(seed: int, step: int) -> tuple[Tensor, ...]:
        return tuple(x[: 8 + (seed % 2 if step == 2 and seed < 99 else 0)] for x in draw(seed, step))

    study = known(own(tasks=Task(name="t", data=data)))
    assert why_apart(trial(study)) == ""
    records = train_own([trial(study, seed=seed) for seed in (0, 1)])
    assert all("differ in structure or shape" in r["apart"] and r["stack"] == 1 for r in records)


def test_frozen_parameters_stay_as_they_are_in_a_stack_too() -> None:
    def build(vocab_size: int) -> nn.Module:
        net = Net(vocab_size)
        net.embed.requires_grad_(False)
        return net

    assert why_apart(trial(own(build=build))) == ""
    records = train_own([trial(own(build=build), seed=seed) for seed in (0, 1)])
    assert "embedding" not in records[0]["curves"]["gradient_norm"]


def test_loss_metric_and_direction_are_the_tasks() -> None:
    task = Task(name="t", data=draw, loss=regress)
    assert (task.metric_name, task.lower_is_better, math.isnan(task.margin)) == ("held-out loss", True, True)
    (record,) = train_own([trial(own(tasks=task))])
    assert record["accuracy"] == record["loss"]
    scored = Task(name="t", data=draw, loss=regress, metric=lambda model, batch: torch.tensor(0.25), metric_name="F1")
    (record,) = train_own([trial(own(tasks=scored))])
    assert record["accuracy"] == 0.25
    assert not scored.lower_is_better


def test_an_optimizer_keeps_its_own_rates_under_the_schedule() -> None:
    seen: list[float] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    recipe = Recipe(steps=4, warm_up=2)
    train_own([trial(own(recipe=recipe, optimizer=lambda model: Watched(model.parameters(), lr=0.8)))])
    assert seen == pytest.approx([0.4, 0.8, 0.8, 0.8])


def test_a_step_of_ones_own_is_the_whole_step() -> None:
    steps: list[float] = []

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        assert model.training
        steps.append(0.5)
        return 0.5

    (record,) = train_own([trial(own(step=step))])
    assert len(steps) == 4
    assert record["loss_area"] == 0.5


def test_edits_change_the_built_model() -> None:
    def flat(model: nn.Module) -> None:
        model.blocks = nn.ModuleList()

    (record,) = train_own([trial(own(variants=[Variant("flat", edits=(flat,))]))])
    assert not any("layer" in part for part in record["curves"]["gradient_norm"])
    assert record["blind"] == ["attention entropy: no attention of [B, H, T, S] is computed"]


class Tupled(nn.Module):
    """Has `num_heads`, and returns what no instrument of the reference expects."""

    def __init__(self, vocab_size: int, num_classes: int) -> None:
        super().__init__()
        self.num_heads = 2
        self.embed, self.out = nn.Embedding(vocab_size, 8), nn.Linear(8, num_classes)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> tuple[Tensor, str]:
        x = self.layer(self.embed(tokens))
        return self.out(self.attention(x, x, x)[0].mean(1)), "and a word"


def test_attention_of_torchs_own_modules_is_seen_and_a_tuple_is_no_obstacle() -> None:
    (record,) = train_own([trial(own(build=Tupled))])
    layers = record["curves"]["entropy"][-1]
    assert [len(heads) for heads in layers] == [2, 2]
    assert all(0 < entropy <= 1.0001 for heads in layers for entropy in heads)
    assert [(len(layer), len(layer[0])) for layer in record["attention"]] == [(2, 8), (2, 8)]
    assert record["blind"] == []


def test_a_metric_that_is_no_number_is_the_users_to_mend_and_divergence_is_not() -> None:
    nan = Task(name="t", data=draw, loss=regress, metric=lambda model, batch: math.nan)
    with pytest.raises(OwnCodeError, match=r"variant 'base', task 't': testing the trained model: .*metric was nan"):
        train_own([trial(own(tasks=nan))])
    with pytest.raises(OwnCodeError, match="the metric is str; a number is required"):
        train_own([trial(own(tasks=Task(name="t", data=draw, loss=regress, metric=lambda model, batch: "good")))])
    recipe = Recipe(steps=60, learning_rate=1e30)
    (record,) = train_own([trial(own(tasks=Task(name="t", data=draw, loss=regress), recipe=recipe))])
    assert record["diverged"]
    assert math.isfinite(record["accuracy"])


def raise_at_two(seed: int, step: int) -> tuple[Tensor, Tensor]:
    if step == 2:
        raise OSError("the disk is gone")
    return draw(seed, step)


def test_what_the_users_code_raises_names_variant_seed_file_and_line() -> None:
    study = known(own(tasks=Task(name="t", data=raise_at_two, held_out=[draw(0, 0)])))
    with pytest.raises(OwnCodeError) as caught:
        train_own([trial(study, seed=5)])
    told = caught.value.told
    assert told.startswith(
        "mine, variant 'base', task 't': getting batch 2: OSError: the disk is gone (test_own.py, line "
    )
    assert caught.value.seed == 5
    assert 'raise OSError("the disk is gone")' in caught.value.frames
    assert "veriformer/ablations" not in caught.value.frames


class Wordy(nn.Linear):
    def forward(self, tokens: Tensor) -> Any:
        return {"words": "none"}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"build": lambda: 3}, "building the model: TypeError: build returned int"),
    "no argument": ({"config": {"gate": 1}}, "the configuration has 'gate', and build takes vocab_size, num_classes"),
    "no parameter": ({"build": nn.Identity}, "Identity has no parameter"),
    "labels": ({"tasks": Task(name="t", data=lambda seed, step: (draw(0, 0)[0], torch.rand(16)))},
               "the labels .16,. of torch.float32; cross-entropy needs integer labels"),
    "a bare batch": ({"tasks": Task(name="t", data=lambda seed, step: draw(0, 0)[0])}, "a batch is a tensor of shape"),
    "no batch": ({"tasks": Task(name="t", data=[], held_out=[draw(0, 0)])}, "the data of task 't' gave no batch"),
    "no test": ({"tasks": Task(name="t", data=draw, held_out=[])}, "there is no held-out batch"),
    "loss": ({"tasks": Task(name="t", data=draw, loss=lambda model, batch: model(batch[0]))}, "the loss is a tensor"),
    "optimizer": ({"optimizer": lambda model: None}, "optimizer returned NoneType"),
    "step": ({"step": lambda model, optimizer, batch: torch.zeros(2)}, "step returned a tensor of shape"),
    "logits": ({"build": lambda: Wordy(1, 1)}, "no logits are found"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_is_told_in_a_sentence(name: str) -> None:
    given, why = WRONG[name]
    with pytest.raises(OwnCodeError, match=why):
        train_own([trial(own(**given))])


STUDIES: dict[str, tuple[Callable[[], object], str]] = {
    "no variants": (lambda: own(variants=[]), "has no variants; the first is the base"),
    "one name twice": (lambda: own(variants=[Variant("a"), Variant("a")]), "two variants called 'a'"),
    "no variant": (lambda: own(variants=["a"]), "each must be a Variant"),
    "task": (lambda: own(tasks="frist"), "did you mean 'first'"),
    "no tasks": (lambda: own(tasks=[]), "has no tasks"),
    "recipe": (lambda: own(recipe={"lr": 1}), "has 'lr' in its recipe; a recipe has steps"),
    "recipe of a variant": (
        lambda: own(variants=[Variant("a", recipe={"lr": 1})]),
        "variant 'a' has 'lr' in its recipe",
    ),
    "name": (lambda: own(name="/"), "letters, digits"),
    "edit": (lambda: own(variants=[Variant("a", edits=("no head",))]), "has the edit 'no head'"),
    "no data": (lambda: Task(name="t"), "neither data nor sample"),
    "nothing to test on": (lambda: Task(name="t", data=[draw(0, 0)]), "has no held_out"),
    "an iterator": (lambda: Task(name="t", data=iter([draw(0, 0)]), held_out=[]), "gone through once"),
    "chance": (lambda: Task(name="t", data=draw, chance=2), "chance of task 't' was 2"),
}


TENSORS = (torch.arange(20.0)[:, None], torch.arange(20))


@pytest.mark.parametrize(
    "data",
    [
        TENSORS,
        TensorDataset(*TENSORS),
        DataLoader(TensorDataset(*TENSORS), batch_size=3),
        [(TENSORS[0][i : i + 1],) for i in range(20)],
    ],
    ids=["tensors", "dataset", "loader", "batches"],
)
def test_a_fifth_of_the_data_is_held_out_where_nothing_was_given_to_test_on(data: object) -> None:
    def seen(part: Any) -> set[float]:
        if isinstance(part, tuple):
            return set(part[0].flatten().tolist())
        return {x for item in part for x in item[0].flatten().tolist()}

    task = Task(name="t", data=data)
    assert task.is_parted
    assert len(seen(task.held_out)) == 4
    assert seen(task.data) | seen(task.held_out) == set(range(20))
    assert not seen(task.data) & seen(task.held_out)
    assert seen(Task(name="t", data=data).held_out) == seen(task.held_out)


def test_a_parameter_that_is_one_number_has_a_gradient_norm() -> None:
    norms = norms_by_part({"log_scale": torch.tensor([-3.0]), "head.weight": torch.ones(1, 2, 2)})
    assert sum(v.item() ** 2 for v in norms.values()) == pytest.approx(13)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_what_is_wrong_with_it(name: str) -> None:
    make, why = STUDIES[name]
    with pytest.raises((ValueError, TypeError), match=why):
        make()


def test_edited_code_is_another_trial_and_a_moved_folder_is_not() -> None:
    study = own(variants=[Variant("a", config={"width": 4})])
    key = trial(known(study, "x")).key((0,))
    assert trial(known(study, "edited")).key((0,)) != key
    moved = Source(target="/elsewhere/here.py:study", files=(("here.py", "x"),))
    assert trial(replace(study, code=moved)).key((0,)) == key
    newer = Source(target="here.py:study", files=(("here.py", "x"),), libraries=(("timm", "1.0"),))
    assert trial(replace(study, code=newer)).key((0,)) != key


def test_the_other_variants_go_on_and_the_record_is_whole(tmp_path: Path) -> None:
    def build(bad: bool = False, **sizes: int) -> nn.Module:
        if bad:
            raise RuntimeError("no such gate")
        return Net(**sizes)

    task = Task(name="t", data=draw, loss=regress, metric_name="error", margin=0.5)
    variants = [Variant("base"), Variant("wide", config={"width": 16}), Variant("bad", config={"bad": True})]
    study = known(own(tasks=task, build=build, variants=variants, predictions=[Prediction("wide", "helps", "a guess")]))
    with Store(tmp_path / "trials.sqlite") as store:
        run = Run([study], [], 2, Grouping(), store)
        ended = [good for _, good in run.advance(Here(), ahead=1)]
        record = run.record("veriformer ablate here.py:study", {})
        again = Run([study], [], 2, Grouping(), store)
    assert sorted(ended) == [False, False, True, True]
    assert not [job for job in again.left if job.trials[0].own.variant != "bad"]
    assert run.faults == {reason: run.faults[reason] for reason in run.failures}
    ((seeds, frames),) = run.faults.values()
    assert sorted(seeds) == [2000, 2001]
    assert "raise RuntimeError" in frames
    (told,) = record["studies"]
    assert [row["variant"] for row in told["rows"]] == ["base", "wide"]
    assert (told["missing"], record["trials"]["missing"]) == (2, 2)
    assert told["notes"] == [
        "wide: it has 3.12 times more parameters than the base, 706 against 226: what is compared is their size, too",
        "wide: 0% of the parameters start as the base's of the same seed do; the data is the same for all",
    ]
    assert told["tasks"][0]["metric"] == "error"
    assert told["tasks"][0]["chance"] is None
    assert told["rows"][0]["parameters"] == sum(p.numel() for p in Net().parameters())
    assert told["rows"][0]["flops"] > 0


def test_a_loss_below_zero_is_no_divergence_and_is_drawn() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return regress(model, batch) - 5

    def build(width: int = 8) -> nn.Module:
        return Net(width=width)

    study = known(own(tasks=Task(name="t", data=draw, loss=loss), build=build, recipe=Recipe(steps=40)))
    (record,) = train_own([trial(study)])
    assert record["diverged"] is None
    assert record["spikes"] == 0
    loss_curve = {"low": [-3.0, -4.0], "median": [-2.0, -3.0], "high": [-1.0, None]}
    row = {"task": "t", "setting": "", "variant": "base", "curves": {"loss": loss_curve, "step": [1, 2]}}
    told = {"rows": [row], "variants": [{"name": "base"}], "tasks": [{"name": "t", "metric": "held-out loss"}]}
    versions = {"torch": "2", "python": "3"}
    figure = curves(told, {"seeds": 1, "device": "cpu", "device_name": "cpu", "versions": versions, "command": "x"})
    assert figure is not None
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("linear", "loss")


def test_our_models_learn_a_task_of_ones_own() -> None:
    task = Task(name="t", data=draw, architecture="classifier", vocab_size=8, num_classes=2, length=6)
    config = {"d_model": 8, "num_heads": 2, "num_layers": 1}
    study = known(own(tasks=task, build=None, config=config, variants=[Variant("base")]))
    assert study.is_own
    assert why_apart(trial(study)) == ""
    (record,) = train_own([trial(study)])
    assert len(record["curves"]["entropy"][0]) == 1


def test_a_worker_that_dies_is_told_with_the_row_it_worked_on(tmp_path: Path) -> None:
    class Dying(Here):
        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(ValueError("Abnormal termination"))
            return future

    with Store(tmp_path / "trials.sqlite") as store:
        run = Run([known(own())], [], 2, Grouping(), store)
        assert [good for _, good in run.advance(Dying(), ahead=1)] == [False]
    assert run.failures == {"mine, variant 'base', task 'first': ValueError: Abnormal termination": 2}
