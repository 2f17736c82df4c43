"""Kernels that work in tiles: right ones of many styles pass `attention.tiles`, each mistake fails at every size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from veriformer.properties import Subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.definitions.attention import attention_oracle
from veriformer.properties.definitions.attention_gradients import exact_attention, stored_attention
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import FAIL, NOT_APPLICABLE, PASS, Result
from veriformer.tests.mutants import tiles, tiles_backward, tiles_masks
from veriformer.tests.mutants.tiled import Tiles, tiled


def _is_fault(part: object) -> bool:
    return isinstance(part, type) and issubclass(part, Tiles) and part is not Tiles


WRONG = [
    part for file in (tiles, tiles_masks, tiles_backward) for part in vars(file).values()
    if _is_fault(part) and part.__module__ == file.__name__
]  # fmt: skip
Kernel = Callable[..., Tensor]


def judged(subject: Subject, *, is_brief: bool = True) -> Result:
    return Judge(subject, Settings(profile="quick"), is_brief=is_brief).judge(catalogue()["attention.tiles"])


def subject_of(kernel: Kernel, **given: Any) -> Subject:
    def forward(
        model: None, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        return kernel(q, k, v, attention_mask, causal)

    return Subject(kind="attention", forward=forward, mask_forms=("pairwise",), **given)


def _shown(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, first: int = 0, of: int | None = None) -> Tensor:
    """Return the scores of keys from `first` on, of a number of keys in all."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    keys = k.shape[2] if of is None else of
    if mask is not None:
        scores = scores.masked_fill(~mask[..., first : first + k.shape[2]], -math.inf)
    if causal:
        past = torch.ones(q.shape[2], keys, dtype=torch.bool).tril(keys - q.shape[2])
        scores = scores.masked_fill(~past[:, first : first + k.shape[2]], -math.inf)
    return scores


def in_the_open(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return _shown(q, k, mask, causal).softmax(-1).nan_to_num(0.0) @ v


def split(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Split the keys in five, and join what comes of each by its log-sum-exp."""
    parts, sizes, at = [], [], 0
    for keys, values in zip(k.chunk(5, 2), v.chunk(5, 2), strict=True):
        scores = _shown(q, keys, mask, causal, at, k.shape[2])
        size = scores.logsumexp(-1, keepdim=True)
        parts.append((scores - size.masked_fill(size == -math.inf, 0.0)).exp() @ values)
        sizes.append(size)
        at += keys.shape[2]
    return (torch.stack(parts) * torch.stack(sizes).softmax(0).nan_to_num(0.0)).sum(0)


def by_sample_and_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Loop over samples and heads."""
    rows = [
        in_the_open(q[b : b + 1, h : h + 1], k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1],
                    None if mask is None else mask[b % len(mask)][None], causal)
        for b in range(q.shape[0]) for h in range(q.shape[1])
    ]  # fmt: skip
    return torch.cat(rows).view(*q.shape[:3], -1)


def in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return in_the_open(q.float(), k.float(), v.float(), mask, causal).to(q.dtype)


def top_left(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Undeclared: torch's is_causal."""
    if causal and mask is not None:
        raise ValueError("one of them")
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def of_few_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if k.shape[2] > 128:
        raise ValueError("at most 128 keys")
    return in_the_open(q, k, v, mask, causal)


def of_whole_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if max(k.shape[2], q.shape[2]) > 64 and (k.shape[2] % 64 or q.shape[2] % 64):
        raise ValueError("behind 64 multiples of 64")
    return in_the_open(q, k, v, mask, causal)


def without_backward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    with torch.no_grad():
        return in_the_open(q, k, v, mask, causal)


def of_nan(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Give NaN to a query that sees no key."""
    return _shown(q, k, mask, causal).softmax(-1) @ v


RIGHT = (
    in_the_open, split, by_sample_and_head, in_float32, top_left, of_few_keys, of_whole_tiles, without_backward, of_nan,
)  # fmt: skip


@pytest.mark.parametrize("kernel", RIGHT, ids=lambda kernel: kernel.__name__)
def test_a_right_kernel_passes(kernel: Kernel) -> None:
    result = judged(subject_of(kernel))
    assert result.outcome == PASS, result.reason
    assert result.margin < 0.5


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 40])
def test_tiles_of_every_size_pass(block: int, window: int | None) -> None:
    result = judged(tiled(Tiles, block, window))
    assert result.outcome == PASS, result.reason


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_mistake_is_noticed_at_every_size(wrong: type[Tiles], block: int) -> None:
    result = judged(tiled(wrong, block, window=40 if wrong is tiles.WindowTile else None))
    assert result.outcome == FAIL, result.reason


def test_a_kernel_of_no_length_at_all_is_not_spoken_of() -> None:
    def refuses(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if k.shape[2] > 30:
            raise ValueError("at most 30 keys")
        return in_the_open(q, k, v, mask, causal)

    result = judged(subject_of(refuses))
    assert result.outcome == NOT_APPLICABLE
    assert "refuses" in result.reason


def number_by_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Sum each row in a loop of torch."""
    rows = []
    for row in _shown(q, k, mask, causal).flatten(0, 2):
        top, total = row.amax(), torch.zeros_like(row[0])
        for score in row:
            total = total + (score - top.clamp(min=-1e30)).exp()
        rows.append((row - top.clamp(min=-1e30)).exp() / total.clamp(min=1e-30))
    return torch.stack(rows).view(*q.shape[:3], -1) @ v


def numbers_in_python(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Sum each row in a loop of Python, which calls no operation of torch."""
    scores, rows = _shown(q, k, mask, causal).detach().double(), []
    for row in scores.flatten(0, 2).tolist():
        terms, total = [], 0.0
        for score in row:
            terms.append(math.exp(score - max(row[0], row[-1], -1e30) - 10))
            total += terms[-1]
        rows.append([term / max(total, 1e-300) for term in terms])
    return torch.tensor(rows, dtype=q.dtype).view(scores.shape) @ v.detach()


@pytest.mark.parametrize("kernel", [number_by_number, numbers_in_python])
def test_what_is_too_much_work_is_left_out_and_said_whatever_the_clock(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for factor in (1.0, 50.0):  # a machine that is fifty times as slow
        clock = time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock, factor=factor: clock() * factor)
        result = judged(subject_of(kernel))
        assert result.outcome == PASS, result.reason
        (left,) = result.unreached
        assert "kinds of calls, from" in left
        told.append((left, result.margin, result.reach))
        monkeypatch.undo()
    assert told[0] == told[1]


def test_the_size_of_a_tile_is_said_where_it_was_measured() -> None:
    result = judged(tiled(tiles.TotalKept, 64), is_brief=False)
    assert result.counterexample is not None
    assert "right up to 64 keys, wrong from 65 on: a tile of 64" in result.counterexample.cause
    assert "the sum of the exponentials is not rescaled" in result.counterexample.cause


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_the_closed_form_is_the_definition(soft_cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(2, 2, 7, n, generator=generator, dtype=torch.float64).requires_grad_() for n in (5, 6))
    allow, weight = torch.ones(3, 7).tril(4).bool(), torch.randn(2, 4, 3, 6, generator=generator, dtype=torch.float64)
    output, _, *pairs = exact_attention(q, k, v, 0.5, allow, soft_cap, weight)
    wanted = attention_oracle(q, k, v, scale=0.5, allow=allow, soft_cap=soft_cap)
    assert torch.allclose(output, wanted, rtol=1e-12, atol=1e-14)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5
    scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
    again = scores.masked_fill(~allow, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    for got, right in zip(pairs[::2], torch.autograd.grad((again * weight).sum(), (q, k, v)), strict=True):
        assert torch.allclose(got, right, rtol=1e-10, atol=1e-12)


def test_what_is_stored_in_half_is_bounded_and_the_closed_form_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64) for n in (5, 40, 40, 5)]
    q, k, v, weight = (x.to(torch.bfloat16) for x in drawn)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    output = (wide[0] @ wide[1].mT * 0.25).softmax(-1) @ wide[2]
    right = (output, *torch.autograd.grad((output * weight.double()).sum(), wide))
    half = [x.requires_grad_() for x in (q, k, v)]
    low = ((half[0] @ half[1].mT) * 0.25).softmax(-1) @ half[2]
    found = (low, *torch.autograd.grad((low * weight).sum(), half))
    for got, wanted, (expected, bound) in zip(found, right, stored_attention(q, k, v, 0.25, weight), strict=True):
        assert torch.allclose(expected, wanted, rtol=1e-10, atol=1e-12)
        assert bool(((got.double() - expected).abs() <= bound).all())
