"""What a study's code does costs its own trials: it prints aside, and raises and ends where nothing else is."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from veriformer.ablations.training.own.blame import OwnCodeError, doing
from veriformer.ablations.trials import own_process
from veriformer.ablations.trials.own_process import asked_apart
from veriformer.ablations.trials.trial import Trial
from veriformer.cli import own_studies
from veriformer.cli.processes.aside import printed_aside
from veriformer.clusters.copies import copied
from veriformer.reports.readable import cleaned

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def _raise(problem: BaseException) -> None:
    raise problem


HARMS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(0),
    "raises": lambda: _raise(GeneratorExit()),
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "kills its group": lambda: os.kill(0, signal.SIGKILL),
    "comes back twice": lambda: copied() and os._exit(0),
    "gives no data": lambda: object(),
    "closes everything": lambda: os.closerange(0, 200),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_asked_apart_has_an_answer_whatever_the_code_does(harm: str, capfd: pytest.CaptureFixture[str]) -> None:
    def ask() -> object:
        print("\x1b[31m")
        return HARMS[harm]()

    assert asked_apart(ask, "lost") == "lost"
    assert capfd.readouterr() == ("", "")


def test_what_is_answered_comes_back() -> None:
    assert asked_apart(lambda: {"flops": 3}, {"flops": 0}) == {"flops": 3}
    assert asked_apart(lambda: "x" * 10**6, "") == "x" * 10**6


@pytest.mark.parametrize("how", ["warns", "raises"])
def test_a_hook_at_a_fork_reaches_nobody(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    is_set = [True]

    def hook() -> None:
        if is_set:
            if how == "raises":
                raise ValueError("no copies of me")
            warnings.warn("os.fork() was called, and this is multithreaded", RuntimeWarning, stacklevel=2)

    os.register_at_fork(before=hook, after_in_parent=hook, after_in_child=hook)  # for as long as the process lives
    try:
        assert asked_apart(lambda: 3, 0) == 3
    finally:
        is_set.clear()
    assert capfd.readouterr() == ("", "")


def test_copies_of_trials_and_of_questions_are_each_made_in_one_place() -> None:
    root = Path(own_process.__file__).parents[2]
    folders = ("ablations", "claims", "cli", "clusters", "properties", "reference", "reports")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    assert [file.name for file in files if "os.fork" in file.read_text("utf-8")] == ["copies.py", "aside.py"]


def test_a_copy_that_waits_for_a_thread_that_it_has_not_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process, "STILL", 0.5)
    held, may_end = threading.Lock(), threading.Event()

    def hold() -> None:
        with held:
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    while not held.locked():
        time.sleep(0.01)
    try:
        assert asked_apart(held.acquire, "lost") == "lost"  # nobody releases it there
    finally:
        may_end.set()
        holder.join()


def test_what_a_study_prints_stands_on_standard_error_as_words(capfd: pytest.CaptureFixture[str]) -> None:
    def study() -> None:
        print("\x1b]0;title\x07 built")
        print("wrong", file=sys.stderr)
        os.write(1, b"from C\n")
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"), printed_aside("study.py"):
        study()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("study.py printed ")
    assert "\\x1b]0;title\\x07 built" in err
    assert "from C" in err
    with printed_aside("study.py"):
        print("a" * 10**6)
    assert len(capfd.readouterr().err) < 3000


@pytest.mark.parametrize("problem", [GeneratorExit(), KeyboardInterrupt(), SystemExit(3), BaseException("odd")])
def test_whatever_is_raised_costs_the_trial(problem: BaseException) -> None:
    said = rf"training: {type(problem).__name__}.*test_studies.py, line \d+"
    with pytest.raises(OwnCodeError, match=said), doing("training", Trial(task="copy", config={}, seed=0)):
        _raise(problem)


def test_a_study_that_ends_its_worker_is_noticed() -> None:
    usual = os._exit
    for status, seen in ((0, 70), (3, 3)):
        child = copied()
        if not child:
            with own_studies._heard_when_it_ends():
                if not (inner := copied()):
                    os._exit(0)  # what it started ends as it wants
                os._exit(status if os.waitpid(inner, 0)[1] == 0 else 99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == seen
    assert os._exit is usual


def test_a_name_without_end_is_cut_where_it_comes_in() -> None:
    told = cleaned({"subjects": [{"name": "a" * 10**6, "target": "m.py:mine"}]})["subjects"][0]
    assert len(told["name"]) <= 200
    assert "1000000 letters" in told["name"]
    assert cleaned(told) == told
