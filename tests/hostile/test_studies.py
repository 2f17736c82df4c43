"""What a study's code does costs its own trials: it prints aside, and raises and ends where nothing else is."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from veriformer.ablations.training.own.blame import OwnCodeError, doing
from veriformer.ablations.trials.own_process import asked_apart
from veriformer.ablations.trials.trial import Trial
from veriformer.cli import own_studies
from veriformer.cli.processes.aside import printed_aside
from veriformer.reports.readable import cleaned

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def _raise(problem: BaseException) -> None:
    raise problem


HARMS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(0),
    "raises": lambda: _raise(GeneratorExit()),
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "kills its group": lambda: os.kill(0, signal.SIGKILL),
    "comes back twice": lambda: os.fork() and os._exit(0),
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
        child = os.fork()
        if not child:
            with own_studies._heard_when_it_ends():
                if not (inner := os.fork()):
                    os._exit(0)  # what it started ends as it wants
                os._exit(status if os.waitpid(inner, 0)[1] == 0 else 99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == seen
    assert os._exit is usual


def test_a_name_without_end_is_cut_where_it_comes_in() -> None:
    told = cleaned({"subjects": [{"name": "a" * 10**6, "target": "m.py:mine"}]})["subjects"][0]
    assert len(told["name"]) <= 200
    assert "1000000 letters" in told["name"]
    assert cleaned(told) == told
