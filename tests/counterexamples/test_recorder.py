"""A recorded run, written down and run again, decides as the check did; what cannot be written down gives no script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from broken_models import layer
from scripts_run import VIOLATED, decision, foreign_imports
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.calling import Caller
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import Counterexample
from veriformer.properties.subject.subject import Subject


class Layer(nn.Module):
    """A layer with a part, a parameter, a buffer and dropout."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x)) + self.shift


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def twice(model: None, x: Tensor) -> Tensor:
    return 2 * x


MODULE = Subject(kind="layer", build=Layer, forward=forward, name="module")
FUNCTION = Subject(kind="layer", forward=twice, name="function")


def failure(check: Callable[[Case], None], subject: Subject) -> Counterexample:
    prop = Property(
        id="tests.claim", statement='A claim with """ and \\.', formula="a = b", source="a test", kinds=("layer",),
        level="core", requires=(), inapplicable=lambda subject: None, sweeps_lengths=False, check=check,
    )  # fmt: skip
    found = Judge(subject, Settings(profile="quick")).judge(prop).counterexample
    assert found is not None
    return found


def x_of(case: Case, built: Any, batch: int = 2) -> Tensor:
    return case.normal(batch, 3, built.config.d_model, dtype=built.dtype)


def changed_input(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    x = x_of(case, built)
    other = x.clone()
    other[0, 1] = 7.0
    case.close(case.call(built, other), case.call(built, x), "another input gives another output")


def larger_than_a_reader_reads(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    x, other = x_of(case, built, 64), x_of(case, built, 64)
    case.close(case.call(built, x[:, :2] * 2 - other[:, :2]), other[:, :2], "many numbers")


def gradients(case: Case) -> None:
    built = case.built(dtype=torch.float64, fresh=True)
    x = x_of(case, built).requires_grad_()
    total = case.call(built, x).square().sum()
    found = torch.autograd.grad(total, [x, *built.module.parameters()])
    case.require((found[1].abs().max() < 0) & (found[0].sum() == 0), "no gradient at all")


def backward(case: Case) -> None:
    built = case.built(dtype=torch.float64, fresh=True)
    case.call(built, x_of(case, built)).sum().backward()
    case.exact(built.module.inner.bias.grad, torch.zeros_like(built.module.inner.bias), "no gradient")


def altered_weights(case: Case) -> None:
    built = case.built(dtype=torch.float32, fresh=True)
    x = x_of(case, built)
    before = case.call(built, x)
    with torch.no_grad():
        for parameter in built.module.parameters():
            parameter.zero_()
        built.module.inner.bias[0] = 3.0
    case.exact(case.call(built, x), before, "the weights do not matter")


def a_copy_that_is_moved(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    twin = case.copy_of(built)
    with torch.no_grad():
        twin.module.shift.add_(1)
    x = x_of(case, built)
    case.close(case.call(twin, x), case.call(built, x), "a copy is another model")


def own_initial_weights(case: Case) -> None:
    built = case.built(dtype=torch.float32, raw=True, fresh=True)
    case.require(built.module.inner.weight.detach().double().abs().max() > 1, "weights start large")


def dropout_from_a_seed(case: Case) -> None:
    built = case.built(dtype=torch.float32, fresh=True)
    x = x_of(case, built)
    outputs = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built.module.train()
            outputs.append(case.call(built, x))
            built.module.eval()
    case.close(outputs[0], outputs[1], "two seeds drop the same")


def numbers_of_python(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    largest = float(case.call(built, x_of(case, built)).abs().max())
    case.require(torch.tensor([largest, 1.0]).sum() < 1, "the largest is below zero")


def rows_one_by_one(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    found = torch.zeros(3)
    for row, output in enumerate(case.call(built, x_of(case, built))[0]):
        found[row] = output.abs().max()
    case.exact(found, torch.zeros(3), "all rows are zero")


def a_part_of_the_model(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    x = x_of(case, built)
    case.exact(case.bench.call(built.module.inner, x), x, "the inner map is the identity")


def outputs_seen(module: nn.Module, call: Caller, x: Tensor) -> list[int]:
    seen: list[int] = []
    hook = module.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    call(x)
    hook.remove()
    return seen


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def a_step_of_its_own(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    seen = case.apply(outputs_seen, built.module, case.caller(built), x_of(case, built))
    case.equal(seen, [5], "the samples are other ones")


def a_count(case: Case) -> None:
    case.equal(case.apply(num_parameters, case.built(dtype=torch.float32).module), 7, "the count is another one")


@pytest.mark.parametrize(
    "check",
    [changed_input, larger_than_a_reader_reads, gradients, backward, altered_weights, a_copy_that_is_moved,
     own_initial_weights, dropout_from_a_seed, numbers_of_python, rows_one_by_one, a_part_of_the_model,
     a_step_of_its_own, a_count],
)  # fmt: skip
def test_what_is_recorded_decides_again(check: Callable[[Case], None]) -> None:
    script = failure(check, MODULE).script
    assert decision(script) == VIOLATED, script
    assert not foreign_imports(script)
    assert "raise SystemExit(violated)" in script


@pytest.mark.parametrize("check", [changed_input, larger_than_a_reader_reads])
def test_a_plain_function_gets_no_model_but_none(check: Callable[[Case], None]) -> None:
    script = failure(check, FUNCTION).script
    assert decision(script) == VIOLATED, script
    assert re.search(r"= forward\(None, .+\)", script)


def test_few_numbers_are_shown_and_many_are_drawn_again() -> None:
    few, many = (failure(check, FUNCTION).script for check in (changed_input, larger_than_a_reader_reads))
    assert "x" in few
    assert "torch.randn" not in few
    assert re.search(r"torch.randn\(\(64, 3, \d+\), generator=", many)
    assert len(many) < 4000


def known_here_alone(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    case.require(bool((case.call(built, x_of(case, built)) == 0).all()), "a condition of Python alone")


def seen_inside(case: Case) -> None:
    built = case.built(dtype=torch.float32)
    seen: list[Tensor] = []
    hook = built.module.inner.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    case.call(built, x_of(case, built))
    hook.remove()
    case.exact(seen[0], torch.zeros_like(seen[0]), "a tensor from inside of the model")


def without_the_subject(case: Case) -> None:
    case.close(x_of(case, case.built(dtype=torch.float32)), torch.zeros(2, 3, 8), "what the subject has no part in")


@pytest.mark.parametrize("check", [known_here_alone, seen_inside, without_the_subject])
def test_what_a_script_could_not_decide_gives_none(check: Callable[[Case], None]) -> None:
    assert failure(check, MODULE).script == ""


def test_a_function_without_a_name_gives_none() -> None:
    assert failure(changed_input, layer(lambda x: 2 * x)).script == ""


def test_a_script_is_tried_before_it_is_given() -> None:
    heard: list[int] = []

    def remembers(model: None, x: Tensor) -> Tensor:
        heard.append(1)
        return x + (len(heard) < 40)

    def is_the_identity(case: Case) -> None:
        built = case.built(dtype=torch.float32)
        x = x_of(case, built)
        case.exact(case.call(built, x), x, "not the identity")

    found = failure(is_the_identity, Subject(kind="layer", forward=remembers))
    assert found.script == ""


def test_a_ready_made_instance_is_imported_and_never_altered() -> None:
    subject = Subject(kind="layer", module=READY, forward=forward)
    script = failure(altered_weights, subject).script
    assert "copy.deepcopy(module)" in script
    weights = READY.inner.weight.detach().clone()
    assert decision(script) == VIOLATED
    assert torch.equal(READY.inner.weight, weights)


class Sizes:
    d_model = 8


READY = Layer(Sizes())


def test_the_words_of_a_claim_do_not_end_the_script() -> None:
    script = failure(changed_input, MODULE).script
    assert ast.get_docstring(ast.parse(script)).startswith('A claim with """ and \\.')
