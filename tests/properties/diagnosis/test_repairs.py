"""A slip of one call is undone, and told, where that mends the failure and nothing else is broken by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties import Subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.repairs import (
    slips_of_axes,
    slips_of_masks,
    slips_of_numbers,
    slips_of_orders,
    slips_of_pieces,
)
from veriformer.properties.diagnosis.repairs.candidates import Failure
from veriformer.properties.diagnosis.repairs.mending import Mended, sites_of
from veriformer.properties.diagnosis.repairs.ordinary_calls import Given
from veriformer.properties.diagnosis.repairs.search import repairs_of
from veriformer.properties.judging.catalogue import catalogue, select
from veriformer.properties.judging.judge import Judge
from veriformer.properties.subject.sizes import DrawnConfig

BLOCK = 4
SLIPS = tuple(
    slip
    for room in (slips_of_axes, slips_of_masks, slips_of_numbers, slips_of_orders, slips_of_pieces)
    for slip in room.SLIPS
)


class Windowed(nn.Module):
    """Attention in blocks of four, whose last one is filled up; which one slip changes."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.table, self.qkv = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, 3 * c.d_model)
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.table(tokens)
        length, real = x.shape[1], torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        short = -length % BLOCK
        filled = functional.pad(x, (0, 0, 0, short))
        seen = self.filled_up(real, short)
        q, k, v = self.qkv(filled).unflatten(1, (-1, BLOCK)).chunk(3, dim=-1)
        hidden = ~seen.unflatten(1, (-1, BLOCK))[:, :, None]
        weights = (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1)
        return x + self.out((weights @ v).flatten(1, 2)[:, :length])

    def filled_up(self, real: Tensor, short: int) -> Tensor:
        return functional.pad(real, (0, short), value=False)


class Tailed(Windowed):
    """What is filled up is taken for real."""

    def filled_up(self, real: Tensor, short: int) -> Tensor:
        return functional.pad(real, (0, short), value=True)


def windowed(module: type[nn.Module]) -> Subject:
    return Subject(
        kind="encoder",
        build=module,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"padding_side": "right", "positions": "other", "sparse": True},
        mask_forms=("padding",),
    )


def mended(subject: Subject) -> dict[str, str]:
    """Return which change mends failures of a subject, by the id of the property."""
    judge = Judge(subject, Settings(profile="quick"))
    results = [judge.judge(prop) for prop in select(only=("padding",))]
    failures = [
        Failure(catalogue()[r.id], r.counterexample.choices)
        for r in results
        if r.outcome == "FAIL" and r.counterexample
    ]
    bench = Workbench(judge.resolved, judge.settings)
    return repairs_of(bench, failures) if failures else {}


def test_a_mask_that_is_filled_up_with_the_wrong_value_is_told_with_its_line() -> None:
    told = mended(windowed(Tailed))
    begins = "one change makes it right: `return functional.pad(real, (0, short), value=False)` in place of"
    assert told
    assert all(sentence.startswith(begins) for sentence in told.values()), told


def test_of_the_right_one_nothing_is_told() -> None:
    assert not mended(windowed(Windowed))


def called(run: Callable[[], Tensor]) -> dict[str, set[str]]:
    """Return what each call of a run may be a slip of, by the name of its function."""
    found: dict[str, set[str]] = {}
    for site, slips in sites_of(run).items():
        found.setdefault(site.name, set()).update(slip.told for slip in slips)
    return found


ORDER = torch.tensor([2, 0, 1])
NUMBERS = torch.arange(24.0).reshape(2, 3, 4)
SQUARE = torch.ones(3, 3, dtype=torch.bool)
BITS = torch.tensor([[True, False, True], [False, False, True]])


@pytest.mark.parametrize(
    ("run", "name", "told", "wanted"),
    [
        (lambda: NUMBERS[0, :, 0].repeat(2), "repeat", "repeat_interleave", NUMBERS[0, :, 0].repeat_interleave(2)),
        (lambda: NUMBERS[0, :, 0].repeat_interleave(2), "repeat_interleave", "tiling", NUMBERS[0, :, 0].repeat(2)),
        (lambda: NUMBERS[:, 1:], "__getitem__", "from the other end", NUMBERS[:, :-1]),
        (lambda: NUMBERS[..., 1:3], "__getitem__", "one later", NUMBERS[..., 2:4]),
        (lambda: NUMBERS[:, -1], "__getitem__", "the place one earlier", NUMBERS[:, -2]),
        (lambda: NUMBERS[0][ORDER], "__getitem__", "inverse", NUMBERS[0][ORDER.argsort()]),
        (lambda: torch.roll(NUMBERS, 1, 1), "roll", "other way", torch.roll(NUMBERS, -1, 1)),
        (lambda: NUMBERS.masked_fill(BITS[..., None], 0.0), "masked_fill", "turned round",
         NUMBERS.masked_fill(~BITS[..., None], 0.0)),
        (lambda: SQUARE.tril(1), "tril", "one lower", SQUARE.tril()),
        (lambda: NUMBERS.reshape(2, 12), "reshape", "axes 1 and 2 exchanged", NUMBERS.mT.reshape(2, 12)),
        (lambda: NUMBERS.reshape(2, 3, 2, 2), "reshape", "axes 1 and 2 parted",
         NUMBERS.reshape(2, 2, 3, 2).transpose(1, 2)),
        (lambda: torch.arange(6) % 3, "remainder", "by the other factor", torch.arange(6) // 2),
        (lambda: BITS[0] & BITS[1], "__and__", "AND and OR", BITS[0] | BITS[1]),
        (lambda: functional.elu(NUMBERS * BITS[..., None]) + 1.0, "add", "left zero",
         (functional.elu(NUMBERS) + 1.0) * (NUMBERS.abs().sum(-1, keepdim=True) > 0) * BITS[..., None]),
    ],
)  # fmt: skip
def test_a_slip_is_undone(run: Callable[[], Tensor], name: str, told: str, wanted: Tensor) -> None:
    site = next(s for s in sites_of(run) if s.name == name)
    slip = next(s for s in SLIPS if name in s.names and told in s.told)
    with Mended(site, slip):
        assert torch.equal(run(), wanted)
    assert not torch.equal(run(), wanted)


def test_what_changes_nothing_is_no_slip() -> None:
    assert "__getitem__" not in called(lambda: NUMBERS[:, :])
    assert not called(lambda: torch.roll(torch.ones(3), 1)).get("roll")


def test_a_change_of_a_stride_is_no_repair_and_one_of_a_position_may_be() -> None:
    as_it_is = Given([], {}, [32, 16, 16])
    assert not Given([], {}, [32, 32, 32]).is_as_large(as_it_is)
    assert not as_it_is.is_as_large(Given([], {}, [32, 32, 32]))
    assert Given([], {}, [32, 18, 16]).is_as_large(as_it_is)
