"""Why parameters stand in the wrong group or none: told by the groups of a changed model, silent where these agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.properties.diagnosis.test_parts import cause
from veriformer.properties.subject.subject import Subject


class RMSNorm(nn.Module):
    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(*[1] * (axes - 1), width))


class Normed(nn.Module):
    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(width, width), RMSNorm(width, axes)


@pytest.mark.parametrize(
    ("axes", "decays", "said"),
    [
        (1, lambda name, p: p.ndim > 1, "PASS"),
        (3, lambda name, p: p.ndim > 1, "kept as [1, 1, "),
        (2, lambda name, p: p.ndim >= 2, "a rule by the number of axes"),
        (3, lambda name, p: "norm" not in name and p.ndim > 1, "PASS"),
        (3, lambda name, p: "bias" not in name, "1 gains of norms decays (norm.gain); biases do not"),
    ],
)
def test_gains_that_decay_for_their_axes_are_told_from_others(
    axes: int, decays: Callable[[str, Tensor], bool], said: str
) -> None:
    def groups(model: nn.Module) -> list[dict[str, object]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ]

    subject = Subject(kind="parameter_groups", build=lambda c: Normed(c.d_model, axes), forward=groups)
    assert said in cause(subject, "schedule.decay-groups")


class Two(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(layers + 1))
        self.head = nn.Linear(width, width)


def _by_number(model: Two, key: Callable[[list[str]], object], wins: str) -> list[dict[str, object]]:
    groups: dict[object, dict[str, object]] = {}
    for name, p in model.named_parameters():
        parts = name.split(".")
        group = {"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0}
        if wins == "last" or (key(parts), p.ndim) not in groups:
            groups[key(parts), p.ndim] = group
    return list(groups.values())


@pytest.mark.parametrize(
    ("key", "wins", "said"),
    [
        (tuple, "last", "PASS"),
        (lambda parts: parts[-2], "last", "those of inner are overwritten by those of outer"),
        (lambda parts: tuple(parts[1:]), "last", "those of inner are overwritten by those of outer"),
        (lambda parts: parts[-2], "first", "those of outer give way to those of inner"),
    ],
)
def test_groups_that_two_stacks_share_are_named(key: Callable[[list[str]], object], wins: str, said: str) -> None:
    subject = Subject(
        kind="parameter_groups",
        build=lambda c: Two(c.d_model, c.num_layers),
        forward=lambda m: _by_number(m, key, wins),
    )
    assert said in cause(subject, "schedule.decay-groups")


def test_a_stack_that_is_left_out_is_not_said_to_be_overwritten() -> None:
    def groups(model: Two) -> list[dict[str, object]]:
        kept = [p for name, p in model.named_parameters() if not name.startswith("inner")]
        matrices = {"params": [p for p in kept if p.ndim > 1], "weight_decay": 0.1}
        return [matrices, {"params": [p for p in kept if p.ndim < 2], "weight_decay": 0.0}]

    subject = Subject(kind="parameter_groups", build=lambda c: Two(c.d_model, c.num_layers), forward=groups)
    told = cause(subject, "schedule.decay-groups")
    assert "in no group and so never trained" in told
    assert "kept by the number" not in told
