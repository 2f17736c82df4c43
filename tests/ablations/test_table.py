"""The table of parts: two stages, best and worst with fresh seeds, what is said of it, and what is derived again."""

from __future__ import annotations

import ast
import json
import pickle
import platform
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from veriformer.ablations.execution.plan import Grouping, Job
from veriformer.ablations.execution.store import Store
from veriformer.ablations.running import Run
from veriformer.ablations.table import design as design_module
from veriformer.ablations.table.conclusions import conclusions
from veriformer.ablations.table.design import TUNING_SEED, Cell, Design, Point
from veriformer.ablations.table.stages import Stages, choose
from veriformer.ablations.table.telling import tell, warnings_before
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.verdicts.machine import machine
from veriformer.ablations.verdicts.stability import repeats, shows_nothing
from veriformer.cli.ablate import status_of
from veriformer.cli.main import main
from veriformer.reports.ablation import figures, latex, markdown, page, write_report
from veriformer.reports.ablation_parts import told_on_a_screen

Once = Callable[[str, Callable[[Path], None]], Path]
SIZE = {"d_model": 8, "num_heads": 2, "positions": "learned"}
SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "rederive_table.py"


class Here:
    """An executor that works at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def small_design() -> Design:
    return Design(
        config=SIZE, recipe=Recipe(steps=2), depths=(1,), rates=(1e-3, 1e-2), warm_ups=(0,), inits=("xavier",),
        removed=((), ("positions",), ("residual",), ("LayerNorm",), ("residual", "LayerNorm")),
        tuning=1, seeds=3, control_seeds=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(once: Once) -> Path:
    """Return the folder of a small run: its store, its report, its record."""

    def train(folder: Path) -> None:
        with Store(folder / "trials.sqlite") as store:
            run = Run([], [], 3, Grouping(), store, design=small_design())
            first = sum(len(job.trials) for job in run.left)
            expected = run.trials
            done = sum(len(job.trials) for job, good in run.advance(Here(), ahead=1) if good)
            record = run.record("veriformer ablate", {})
        assert first < done == expected == record["trials"]["finished"], "the second stage is named by the first"
        (folder / "record").write_bytes(pickle.dumps(record))
        write_report(record, folder / "out")

    return once("small table", train)


@pytest.fixture
def record(made: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads((made / "record").read_bytes())
    return found


def test_no_seed_tunes_and_reports(record: dict[str, Any]) -> None:
    table = record["table"]
    by_stage: dict[str, set[int]] = {}
    for stage, seed in zip(table["trials"]["stage"], table["trials"]["seed"], strict=True):
        by_stage.setdefault(stage, set()).add(seed)
    assert by_stage == {"tuning": {TUNING_SEED}, "best": {2000, 2001, 2002}, "worst": {2000, 2001, 2002}}
    with pytest.raises(ValueError, match=r"the seeds 4294967290 to 4294967313 were asked for"):
        Design(first_seed=TUNING_SEED - 6)


def test_every_row_is_there_and_a_theorem_is_exact(record: dict[str, Any]) -> None:
    rows = record["table"]["rows"]
    assert [(r["task"], "+".join(r["removed"])) for r in rows] == [
        (task, removed)
        for task in ("precede", "count")
        for removed in ("", "positions", "residual", "LayerNorm", "residual+LayerNorm")
    ]
    for row in rows:
        line = row["devices"]["cpu"]
        assert line["best"]["accuracy"][1] <= line["best"]["accuracy"][0] <= line["best"]["accuracy"][2]
        seeds = 3 if row["task"] == "precede" and not row["forced"] else 2  # a theorem: one for each of two settings
        assert line["best"]["seeds"] == line["worst"]["seeds"] == seeds
        assert row["forced"] == (row["task"] == "precede" and "positions" in row["removed"])
        if row["forced"]:
            assert line["best"]["by_seed"] == [0.5] * 2
            assert line["checks"]["permutation"]["holds"]
            assert line["verdict"] == "forced"
    assert status_of(record) == 0


def test_a_violated_theorem_of_the_table_is_a_failure(record: dict[str, Any]) -> None:
    record["table"]["rows"][1]["devices"]["cpu"]["checks"]["permutation"]["holds"] = False
    assert status_of(record) == 1


def test_what_is_stored_is_not_trained_again(made: Path) -> None:
    with Store(made / "trials.sqlite") as store:
        run = Run([], [], 3, Grouping(), store, design=small_design())
        assert run.left == []
        assert run.done == run.trials


def test_an_interrupted_first_stage_goes_on(made: Path, tmp_path: Path) -> None:
    design = small_design().cut(["count"], ["residual"])
    assert design is not None
    stages = Stages(design, Grouping())
    tuning = [job for cell in design.cells() for job in stages.tuning(cell)]
    with Store(made / "trials.sqlite") as whole, Store(tmp_path / "trials.sqlite") as store:
        for job in tuning[:-1]:
            found = whole.get(job.keys)
            store.add((key, trial.to_json(), found[key]) for key, trial in zip(job.keys, job.trials, strict=True))
        run = Run([], [], 3, Grouping(), store, design=design)
        assert tuning[-1] in run.left
        named = {job.trials[0].config.get("residual", True) for job in run.left if job.trials[0].seed < TUNING_SEED}
        assert named == {True}, "the row whose sweep is whole goes on, the other one waits"
        told = run.record("x", {})["table"]
    assert [row["devices"]["cpu"]["best"] for row in told["rows"]] == [None, None]
    assert told["conclusions"]["sentences"] == []
    assert "–" in next(line for line in told_on_a_screen(told) if "nothing" in line)


def records(*accuracy: float, area: float = 0.5) -> list[dict[str, Any]]:
    return [{"accuracy": a, "loss_area": area} for a in accuracy]


def test_the_best_has_the_highest_mean_and_among_equals_the_smaller_area() -> None:
    points = [Point(rate, 0, "xavier") for rate in (1e-3, 2e-3, 3e-3, 4e-3)]
    found = [records(1.0, 0.9), records(1.0, 1.0, area=0.4), records(1.0, 1.0, area=0.3), records(0.5, 1.0)]
    tuned = choose(dict(zip(points, found, strict=True)), "precede")
    assert (tuned.best, tuned.worst) == (points[2], points[3])
    assert tuned.trains == (False, True, True, False)


def line(verdict: str, accuracy: float, trains: list[bool] | None) -> dict[str, Any]:
    told = {"accuracy": [accuracy, accuracy, accuracy], "by_seed": [accuracy] * 4}
    counted = None if trains is None else {"count": sum(trains), "of": len(trains), "by_point": trains}
    return {"verdict": verdict, "best": told, "worst": told, "trains": counted}


ALL, FEW = [True] * 18, [True] * 4 + [False] * 14


def said(*lines: dict[str, Any], removed: tuple[tuple[str, ...], ...] = ((), ("LayerNorm",))) -> list[str]:
    design = Design(tasks=("precede",), depths=(6,), removed=removed)
    return [s["text"] for s in conclusions(design, lines)["sentences"]]


@pytest.mark.parametrize(
    ("verdict", "trains", "expected"),
    [
        ("equivalent", FEW, "buys width of the range in which training works, not accuracy at its best"),
        ("equivalent", ALL, "buys neither accuracy at its best nor a wider range that this sweep could show"),
        ("hurts", ALL, "buys accuracy at its best (N=6"),
        ("hurts", FEW, "buys accuracy at its best, and width of the range in which training works"),
        ("no evidence", FEW, "in which training works; whether accuracy at its best too is open"),
        ("too few seeds", ALL, "buys nothing that this sweep and these seeds could show"),
    ],
)
def test_what_is_said_follows_from_the_numbers(verdict: str, trains: list[bool], expected: str) -> None:
    (text,) = said(line("base", 1.0, ALL), line(verdict, 0.9, trains))
    assert expected in text
    assert f"0.900 without, 1.000 with: {verdict}; trains at {sum(trains)} of 18 settings, 18 with" in text


def test_a_range_that_is_wider_without_a_part_is_told() -> None:
    (text,) = said(line("base", 1.0, FEW), line("equivalent", 1.0, ALL))
    assert "neither accuracy" in text
    assert "the range is wider without it" in text


def test_a_forced_row_is_no_finding_of_the_sweep() -> None:
    (text,) = said(line("base", 1.0, ALL), line("forced", 0.5, None), removed=((), ("positions",)))
    assert "positions buy the order of the tokens (N=6: 0.500 without, a theorem checked exactly, 1.000 with)" in text


def test_two_parts_that_depend_on_each_other() -> None:
    removed = ((), ("residual",), ("LayerNorm",), ("residual", "LayerNorm"))
    lines = [line("base", 1.0, ALL), line("hurts", 0.5, FEW), line("equivalent", 1.0, ALL), line("hurts", 0.9, ALL)]
    text = said(*lines, removed=removed)[-1]
    assert "at depth 6 to lose both costs less than the sum of the two (0.900 without both" in text
    assert "interaction +0.400 [+0.400, +0.400]" in text


def test_a_verdict_that_hangs_on_one_seed_does_not_repeat() -> None:
    assert repeats([1.0] * 24, [0.5] * 24) == 1.0
    assert repeats([1.0] * 24, [1.0] * 24) == 1.0
    assert repeats([1.0] * 24, [0.5] * 5 + [1.0] * 19) < 0.95
    assert repeats([1.0] * 24, [0.5] + [1.0] * 23) < 0.95
    same, rare, worse = [0.0] * 12, [0.0] * 11 + [-0.5], [-0.5] * 12
    assert repeats([1.0] * 12, [1.0] * 12, alike=[same, same]) == 1.0
    assert repeats([1.0] * 12, [1.0] * 12, alike=[same, rare]) < 0.95
    assert repeats([1.0] * 12, [1.0] * 12, alike=[worse]) == 1.0, "another effect is no kind of seed"
    assert repeats([1.0] * 12, [0.5] * 12, alike=[same]) == 1.0
    assert [shows_nothing(v) for v in ("alike if alive", "no evidence", "hurts", "helps, slower")] == [
        True,
        True,
        False,
        False,
    ]


def test_too_few_seeds_are_announced() -> None:
    assert warnings_before(Design()) == []
    (warning,) = warnings_before(Design(seeds=4, control_seeds=4))
    assert warning.startswith("table: 4 seeds cannot reach a verdict; the smallest p is 0.12")


def test_models_of_a_sweep_share_stacks_and_their_key_knows_it() -> None:
    design = Design()
    stages = Stages(design, Grouping())
    cell = Cell("precede", 2, ())
    jobs = stages.tuning(cell)
    assert [len(job.trials) for job in jobs] == [18, 18]
    alone = Job(jobs[0].trials[:1])
    assert len({*jobs[0].keys, *jobs[1].keys, *alone.keys}) == 37
    assert [len(job.trials) for job in Stages(design, Grouping(width=5)).tuning(cell)] == [5] * 7 + [1]
    everywhere = stages.everywhere(Cell("precede", 2, ("positions",)))
    assert len({(t.recipe, t.config["init"]) for job in everywhere for t in job.trials}) == len(design.points())


@pytest.fixture
def with_cuda(made: Path, tmp_path: Path) -> Store:
    """Return a store in which the same trials stand once more as another device's."""
    store = Store(tmp_path / "both.sqlite")
    design = small_design()
    here, there = Stages(design, Grouping()), Stages(design, Grouping("cuda"))
    with Store(made / "trials.sqlite") as whole:
        found = here.find(whole.get)
        names = {trial.to_json()["seed"]: None for job in here.jobs(found) for trial in job.trials}
        assert names
        by_trial = {
            json.dumps({**trial.to_json(), "device": "cuda"}, sort_keys=True): (trial, key)
            for job in here.jobs(found)
            for trial, key in zip(job.trials, job.keys, strict=True)
        }
        store.add((key, trial.to_json(), found[key]) for trial, key in by_trial.values())
        known = -1
        there_found: dict[str, Any] = {}
        while len(there_found) != known:
            known = len(there_found)
            for job in there.jobs(there_found):
                for trial, key in zip(job.trials, job.keys, strict=True):
                    original = by_trial[json.dumps(trial.to_json(), sort_keys=True)][1]
                    store.add([(key, trial.to_json(), found[original])])
            there_found = dict(there.find(store.get))
    return store


def test_the_other_device_has_its_column_where_it_was_run(with_cuda: Store, record: dict[str, Any]) -> None:
    table = tell(Stages(small_design(), Grouping()), with_cuda.get)
    with_cuda.close()
    assert table["devices"] == ["cpu", "cuda"]
    assert all(row["agreement"] == {"best": True, "worst": True, "verdict": True} for row in table["rows"])
    assert sum(1 for text in told_on_a_screen(table) for line in text.splitlines() if line.endswith("agrees")) == 10
    assert record["table"]["devices"] == ["cpu"]
    assert all(row["agreement"] is None for row in record["table"]["rows"])
    apart = json.loads(json.dumps(table))
    apart["rows"][0]["agreement"]["worst"] = False
    assert "another worst" in "\n".join(told_on_a_screen(apart))


def test_the_table_stands_first_in_every_form(made: Path, record: dict[str, Any]) -> None:
    title = "What is left of a Transformer without positions, residual, LayerNorm, each pair and all three"
    assert markdown(record).index(title) < markdown(record).index("| task")
    shown = page(record, figures(record))
    assert shown.index('href="#table"') < shown.index('id="table"') < shown.index("How it was made")
    assert "0.001, 0.01 x warm-up 0 steps x initial weights xavier" in shown
    assert "vocabulary of 8" in shown
    assert latex(record).count(r"\begin{tabular}") == 1
    sheet = (made / "out" / "table.csv").read_text()
    assert sheet.count("\ntable,") == 20
    assert (made / "out" / "table-parts.png").exists()


BROWSER, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--proxy-server=127.0.0.1:9"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with chromedriver here")
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_screen_and_a_telephone_by_day_and_night(
    browser: webdriver.Chrome, made: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 400}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get((made / "out" / "index.html").as_uri())
    asked: Callable[[str], Any] = lambda script: browser.execute_script(f"return {script}")  # noqa: E731
    assert asked("document.documentElement.scrollWidth") == width
    assert asked("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)")
    ground = asked("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 25, 28)")
    head = "document.querySelector('table.cards thead').getBoundingClientRect().right"
    assert (asked(head) < 0) == (width == 400), "columns are folded into cards where they do not fit"
    assert browser.get_log("browser") == []


def rederived(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(ended.value.code or 0)


def test_the_table_is_derived_again_from_its_trials(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rederived(made / "out" / "ablation.json", monkeypatch) == 0
    assert "0 differ" in capsys.readouterr().out
    told = json.loads((made / "out" / "ablation.json").read_text())
    told["table"]["rows"][0]["devices"]["cpu"]["best"]["dead"]["count"] += 1
    told["table"]["trials"]["accuracy"][-1] += 0.25
    (tmp_path / "changed.json").write_text(json.dumps(told))
    assert rederived(tmp_path / "changed.json", monkeypatch) == 1
    seen = capsys.readouterr().out
    assert "cpu precede N=1 without nothing best dead: the table says" in seen
    assert "cpu count N=1 without residual+LayerNorm worst accuracy mean: the table says" in seen


def test_the_script_knows_nothing_of_veriformer() -> None:
    tree = ast.parse(SCRIPT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("veriformer", "ablations", "scipy", "torch"))]


def test_the_machine_is_named_where_it_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some Chip 9000\n")
    assert machine(tmp_path / "cpuinfo")["processor"] == "Some Chip 9000"
    assert machine(tmp_path / "nothing")["processor"] == platform.machine()


def test_a_table_is_cut_to_what_is_asked_for() -> None:
    design = Design(recipe=Recipe(steps=3)).cut(["count"], ["residual+LayerNorm"])
    assert design is not None
    assert [cell.removed for cell in design.cells()] == [(), ("residual", "LayerNorm")] * 2
    assert {cell.task for cell in design.cells()} == {"count"}
    assert Design().cut(["copy"], []) is None


def test_the_command_without_arguments_makes_the_table(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(design_module, "Design", lambda **changes: replace(small_design(), **changes))
    shutil.copy(made / "trials.sqlite", tmp_path / "trials.sqlite")
    for words in ([], ["--resume"]):
        with pytest.raises(SystemExit) as ended:
            main(["ablate", *words, "--jobs", "1", "--out", str(tmp_path)])
        assert ended.value.code == 0
        seen = capsys.readouterr()
        assert "What is left of a Transformer without positions" in seen.out
        assert "permutation changes no logit of 2 trained models in 1 row (" in seen.out
        assert "table: 2 seeds cannot reach a verdict" in seen.err
        assert ("going on with: veriformer ablate table" in seen.err) == bool(words)
    told = json.loads((tmp_path / "ablation.json").read_text())
    assert told["command"] == "veriformer ablate table"
    assert told["studies"] == []
    with pytest.raises(SystemExit) as ended:
        main(["ablate", "--variant", "residual+norm", "--out", str(tmp_path)])
    assert ended.value.code == 3
    assert "there is no variant 'residual+norm' here; there are positions, residual" in capsys.readouterr().err
