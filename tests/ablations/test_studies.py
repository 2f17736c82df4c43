"""Every study is whole: its models build, its predictions speak of rows, the design's table is there."""

from __future__ import annotations

import pytest
import torch

from veriformer.ablations.execution.memory import bytes_per_seed, fitting_width
from veriformer.ablations.execution.plan import Grouping, jobs_of
from veriformer.ablations.measuring.profiling import kept_bytes
from veriformer.ablations.studies import DEFAULT, MEASUREMENTS, STUDIES, TABLE
from veriformer.ablations.studies.study import Expectation, Study
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.training.stacking import build_one
from veriformer.ablations.trials.trial import Trial

REQUIRED = (
    "positions", "residual", "norm", "warm-up", "scaling", "feed-forward", "pooling", "depth-width", "recipe",
    "decoder", "seq2seq", "entropy", "scaling-law", "views",
)  # fmt: skip


def test_the_studies_of_the_design_are_there() -> None:
    assert set(REQUIRED) <= set(STUDIES)
    assert DEFAULT == (TABLE,)
    assert TABLE not in {*STUDIES, *MEASUREMENTS}, "a name is one thing"


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_every_model_of_a_study_builds_and_runs(study: Study) -> None:
    seen = set()
    for task, setting, variant in study.rows():
        trial = study.trial(task, setting, variant, 0)
        kind = (task, str(trial.config), trial.edits)
        if kind not in seen:
            seen.add(kind)
            output = build_one(trial)(*TASKS[task].draw(0, 2).inputs)
            assert output.shape[-1] in (TASKS[task].num_classes, TASKS[task].vocab_size)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_every_prediction_speaks_of_a_row(study: Study) -> None:
    rows = [(task, setting.name, variant.name) for task, setting, variant in study.rows()]
    assert study.predictions, "a study without a prediction cannot be wrong"
    for prediction in study.predictions:
        for task in prediction.tasks or ("",):
            for setting in prediction.settings or ("",):
                spoken = [
                    r for r in rows
                    if prediction.speaks_of(*r) and (not task or r[0] == task) and (not setting or r[1] == setting)
                ]  # fmt: skip
                assert spoken, f"{study.name}: {prediction} is about nothing"


def test_every_prediction_has_a_source_and_a_date() -> None:
    for study in STUDIES.values():
        for prediction in study.predictions:
            assert "seen" not in prediction.source, f"{study.name}: {prediction} was looked up in an earlier run"
            assert len(prediction.source) > 10
            assert prediction.registered, f"{study.name}: {prediction} has no date"


def test_runs_start_at_a_seed_that_tuning_does_not_use() -> None:
    study = STUDIES["residual"]
    task, setting, variant = next(study.rows())
    (job,) = Grouping().jobs(study, task, setting, variant, 3)
    assert [trial.seed for trial in job.trials] == [2000, 2001, 2002]
    (job,) = Grouping(first_seed=5).jobs(study, task, setting, variant, 2)
    assert [trial.seed for trial in job.trials] == [5, 6]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_every_row_has_its_base(study: Study) -> None:
    rows = [(task, setting.name, variant.name) for task, setting, variant in study.rows()]
    for task, setting, _ in rows:
        assert (task, setting, study.variants[0].name) in rows


def test_an_expectation_is_of_something_that_the_answer_finds() -> None:
    for study in STUDIES.values():
        names = {", ".join(filter(None, (t, s.name, v.name))) for t, s, v in study.rows()} | {*study.tasks}
        for expectation in study.expectations:
            assert study.fit, f"{study.name}: nothing is made of its rows"
            assert expectation.registered, f"{study.name}: {expectation} has no date"
            start = [n for n in names if expectation.about.startswith((f"{n}:", f"{n} against"))]
            assert start, f"{study.name}: {expectation.about} is about nothing"


def test_a_date_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="registered 'soon'; a date like 2026-11-22 is required"):
        Expectation("x", 0.0, 1.0, "", registered="soon")


def test_variants_differ_from_the_base() -> None:
    for study in STUDIES.values():
        for task, setting, variant in study.rows():
            if variant is not study.variants[0]:
                ours, base = (study.trial(task, setting, v, 0) for v in (variant, study.variants[0]))
                differ = (ours.config, ours.recipe, ours.edits) != (base.config, base.recipe, base.edits)
                assert differ, f"{study.name}: {variant.name} is the base under another name"


def test_studies_share_their_common_trials() -> None:
    apart = sum(len(jobs_of([STUDIES[name]], 12, Grouping())) for name in ("norm", "warm-up"))
    assert len(jobs_of([STUDIES["norm"], STUDIES["warm-up"]], 12, Grouping())) < apart


def test_the_longest_jobs_come_first() -> None:
    costs = [job.cost for job in jobs_of([STUDIES["residual"]], 2, Grouping())]
    assert costs == sorted(costs, reverse=True)


def test_a_changed_setting_changes_the_key() -> None:
    trial = Trial(task="precede", config={"d_model": 32}, seed=0)
    others = [
        Trial(task="first", config={"d_model": 32}), Trial(task="precede", config={"d_model": 64}),
        Trial(task="precede", config={"d_model": 32}, seed=1),
        Trial(task="precede", config={"d_model": 32}, device="cuda"),
        Trial(task="precede", config={"d_model": 32}, edits=("no feed-forward",)),
        Trial(task="precede", config={"d_model": 32}, checks=("permutation",)),
    ]  # fmt: skip
    keys = [trial.key((0,)), trial.key((0, 1)), *(o.key((0,)) for o in others)]
    assert len(set(keys)) == len(keys)
    assert trial.key((0,)) == Trial(task="precede", config={"d_model": 32}, seed=0).key((0,))


def test_memory_splits_stacks() -> None:
    study = STUDIES["positions"]
    task, setting, variant = next(study.rows())
    one = bytes_per_seed(study.trial(task, setting, variant, 0))
    assert fitting_width(study.trial(task, setting, variant, 0), 3.5 * one) == 3
    assert fitting_width(study.trial(task, setting, variant, 0), 1) == 1
    jobs = Grouping(max_memory=3.5 * one).jobs(study, task, setting, variant, 8)
    assert [len(job.trials) for job in jobs] == [3, 3, 2]


@pytest.mark.parametrize("name", ["positions", "residual", "decoder", "depth-width"])
def test_the_estimate_of_memory_covers_what_the_backward_keeps(name: str) -> None:
    study = STUDIES[name]
    for task, setting, variant in study.rows():
        trial = study.trial(task, setting, variant, 0)
        model = build_one(trial)
        inputs = TASKS[task].draw(0, trial.recipe.batch_size).inputs
        kept = kept_bytes(lambda model=model, inputs=inputs: model(*inputs))
        assert kept <= bytes_per_seed(trial) <= 20 * kept
    assert torch.is_grad_enabled()
