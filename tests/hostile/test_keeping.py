"""What keeps subjects apart, part by part: the wire, what is printed, clocks, flags, copies."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.cli.processes.printed import KEPT, Printed
from veriformer.cli.processes.wire import NoAnswerError, Wire
from veriformer.properties.adapters.homes import Surroundings
from veriformer.properties.bench import guards
from veriformer.properties.bench.guards import SubjectError, guarded, whose_fault
from veriformer.properties.bench.isolation import kept_flags
from veriformer.properties.bench.pool import duplicate
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.results.clocks import SIZE, Pulse, counted, read


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    first, second = socket.socketpair()
    with first, second:
        yield Wire(first), Wire(second)


def test_a_message_arrives_whole_or_not_at_all(ends: tuple[Wire, Wire]) -> None:
    ours, theirs = ends
    theirs.end.sendall(b'[1, "ok"')
    assert ours.take() is None
    theirs.end.sendall(b", {}]\n[2]\n")
    assert ours.take() == [1, "ok", {}]
    assert ours.take() == [2]
    ours.send({"half": "\ud800"})
    assert theirs.receive() == {"half": "\ud800"}


@pytest.mark.parametrize("sent", [b"garbage\n", b"\x00\xff\n", b"[" * 100_000 + b"\n"])
def test_garbage_is_no_answer_and_nothing_is_waited_for(ends: tuple[Wire, Wire], sent: bytes) -> None:
    ours, theirs = ends
    theirs.end.sendall(sent)
    with pytest.raises(NoAnswerError):
        ours.take()
    theirs.close()
    with pytest.raises(EOFError):
        ours.take()


def test_the_end_of_what_is_printed_is_kept_and_all_of_it_counted() -> None:
    printed = Printed()
    for _ in range(100):
        printed.add(b"x" * 10_000 + b"\n")
    printed.add(b"last \xff words\n")
    assert len(printed.kept) == KEPT
    assert printed.size == 100 * 10_001 + 13
    assert printed.last_words == "last \\xff words"
    both = Printed()
    both += printed
    both += printed
    assert both.size == 2 * printed.size
    assert Printed().last_words == ""


def test_a_sleeping_process_is_on_the_clock() -> None:
    before = counted()
    time.sleep(0.05)
    assert counted() - before > 0.04


def test_a_pulse_tells_what_is_done_and_what_was_done_before() -> None:
    pulse = Pulse()
    outer = pulse.begin(3.0)
    inner = pulse.begin(0)
    assert pulse.numbers[1:3] == [2.0, 0.0]
    pulse.end(inner)
    assert pulse.numbers[1:3] == [1.0, 3.0]
    pulse.end(outer)
    assert pulse.numbers[1:3] == [0.0, 0.0]
    assert pulse.numbers[0] == 8


class Watched(list[float]):
    """Numbers that somebody reads whenever one is written."""

    def __init__(self) -> None:
        super().__init__([0.0] * SIZE)
        self.seen: list[tuple[float, float, float] | None] = []

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, value)
        self.seen.append(read(self))


def test_who_reads_a_pulse_while_it_changes_takes_no_limit_for_that_of_another_call() -> None:
    pulse, numbers = Pulse(), Watched()
    pulse.numbers = numbers
    pulse.end(pulse.begin(3.0))
    told = [(doing, limit) for one in numbers.seen if one is not None for _, doing, limit in [one]]
    assert told == [(1.0, 3.0), (0.0, 0.0)]


class Own(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(("raised", "said"), [(SystemExit(3), "SystemExit: 3"), (Own(), "Own: no message")])
def test_who_asks_python_to_exit_has_raised(raised: BaseException, said: str) -> None:
    def forward() -> None:
        raise raised

    with pytest.raises(SubjectError, match=f"the subject raised {said}"):
        guarded(forward, (), {}, 1.0)


def test_ctrl_c_passes_through() -> None:
    def forward() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(forward, (), {}, 1.0)


def test_flags_of_torch_are_put_back() -> None:
    def forward() -> None:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)

    guarded(forward, (), {}, 1.0)
    assert torch.zeros(1).device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.no_grad(), kept_flags():
        torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.lock = threading.Lock()


class Single(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is but one of me")


def test_what_cannot_be_copied_is_shared_or_refused_in_one_sentence() -> None:
    model = Locked()
    twin = duplicate(model)
    assert twin.lock is model.lock
    assert twin.linear.weight is not model.linear.weight
    with pytest.raises(SubjectError, match=r"refuses to be copied: TypeError: there is but one of me; give build="):
        duplicate(Single(2, 2))


def test_whose_code_raised_is_told_by_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text("def raises():\n    raise RuntimeError('no')\n", encoding="utf-8")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), space)
    with pytest.raises(RuntimeError) as raised:
        space["raises"]()
    assert whose_fault(raised.value.with_traceback(raised.value.__traceback__.tb_next)) == "theirs.py, line 2"  # type: ignore[union-attr]


def test_what_replaced_arithmetic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whose_fault(RuntimeError()) is None
    monkeypatch.setattr(Tensor, "isfinite", lambda x: x)
    assert whose_fault(RuntimeError()) == "it replaced torch.Tensor.isfinite, which judges what it gives"


@pytest.mark.parametrize(
    ("problem", "said"),
    [(MemoryError(), "no memory left"), (OSError(24, ""), "too many files open"), (OSError(28, ""), "there is no room"),
     (OSError(27, ""), "there is no room"), (OSError(2, ""), None)],
)  # fmt: skip
def test_what_a_process_has_no_more_of_is_no_mistake_of_ours(problem: BaseException, said: str | None) -> None:
    told = whose_fault(problem)
    assert (told is None) if said is None else (said in (told or ""))


def test_what_imports_need_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings = Surroundings()
    for name in ("path", "meta_path", "path_hooks"):
        monkeypatch.setattr(sys, name, [])
    monkeypatch.delitem(sys.modules, "json")
    monkeypatch.setattr(time, "perf_counter", None)
    surroundings.put_back()
    assert sys.path
    assert sys.meta_path
    assert "json" in sys.modules
    assert time.perf_counter() > 0


def test_a_canary_is_judged_to_the_end() -> None:
    assert Settings(profile="quick", hurries=False).effort.property_seconds == float("inf")


def test_control_characters_do_not_pass() -> None:
    assert guards.printable("a\x1b[31m\ud800\n") == "a\\x1b[31m\\ud800\n"
