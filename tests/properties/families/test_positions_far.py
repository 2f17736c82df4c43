"""Far positions: right code in several styles passes, and what counts or scales wrongly far out is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.definitions.angles import places, right_tables, turned
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import Result
from veriformer.properties.subject.subject import Subject

EXACT = {"positions": "sinusoidal", "layout": "interleaved", "half_precision": True}


def judged(subject: Subject, seed: int = 0) -> Result:
    judge = Judge(subject, Settings(profile="quick", seed=seed, named=("positions.far",)))
    return judge.judge(named(("positions.far",))[0])


def sinusoids(make: Callable[[int, int], nn.Module], **facts: Any) -> Subject:
    return Subject(
        kind="positions",
        build=lambda c: make(c.d_model, c.max_len),
        forward=lambda m, length: m(length),
        declares={**EXACT, **facts},
    )


class Buffer(nn.Module):
    """The usual table: float32, a buffer of max_len rows, an odd width cut off or filled up, or refused."""

    def __init__(self, width: int, max_len: int, odd: str = "cut", slip: str = "") -> None:
        super().__init__()
        if width % 2 and odd == "refused":
            raise ValueError(f"the width was {width}; it must be even")
        whole = width + width % 2 if odd == "cut" else width - width % 2
        padded = -(-whole // 64) * 64 if slip == "padded" and whole > 64 else whole
        rates = torch.exp(torch.arange(0, whole, 2).float() * (-math.log(10000.0) / padded))
        index = torch.arange(max_len)
        index = {"wrapped": index % 512, "clamped": index.clamp(max=511)}.get(slip, index)
        angles = index.float()[:, None] * rates
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        full = torch.zeros(max_len, width)
        full[:, : min(whole, width)] = table[:, :width]
        self.register_buffer("table", full, persistent=False)

    def forward(self, length: int) -> Tensor:
        if length > len(self.table):
            raise IndexError(f"{length} positions asked of {len(self.table)}")
        return self.table[:length]


class Frequencies(nn.Module):
    """The frequencies alone are a buffer: moved with the model they are rounded, unless they are made anew."""

    def __init__(self, width: int, max_len: int, anew: bool = True) -> None:
        super().__init__()
        self.width, self.anew = width, anew
        self.register_buffer("rates", self.made(), persistent=False)

    def made(self) -> Tensor:
        return 1.0 / 10000.0 ** (torch.arange(0, self.width, 2).float() / self.width)

    def forward(self, length: int) -> Tensor:
        rates = self.made() if self.anew else self.rates.float()
        angles = torch.arange(length).float()[:, None] * rates
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.width].to(self.rates.dtype)


def test_right_tables_pass() -> None:
    right = {
        "cut": sinusoids(lambda d, n: Buffer(d, n)),
        "filled up": sinusoids(lambda d, n: Buffer(d, n, odd="filled")),
        "refused": sinusoids(lambda d, n: Buffer(d, n, odd="refused")),
        "made anew": sinusoids(lambda d, n: Frequencies(d, n), beyond_max_len="works"),
    }
    said = {(words, seed): judged(subject, seed).outcome for seed in (0, 1) for words, subject in right.items()}
    assert set(said.values()) == {"PASS"}, said


@pytest.mark.parametrize(
    ("slip", "said"),
    [("padded", "the frequencies are those of a width of 128"),
     ("wrapped", "from position 512 on the rows are those of positions 0, 1, 2"),
     ("clamped", "from position 512 on the rows are those of position 511"),
     ("buffer", "the frequencies are rounded to bfloat16")],
)  # fmt: skip
def test_wrong_tables_are_told(slip: str, said: str) -> None:
    make = (lambda d, n: Frequencies(d, n, anew=False)) if slip == "buffer" else (lambda d, n: Buffer(d, n, slip=slip))
    subject = sinusoids(make)
    if slip == "padded":  # 96 alone of the widths is no multiple of 64
        subject = Subject(kind="positions", build=subject.build, forward=subject.forward, declares=subject.declares,
                          domain={"d_model": (96,), "num_heads": (1,)})  # fmt: skip
    result = judged(subject)
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert said in str(result.counterexample.cause)


def test_what_is_right_in_half_precision_is_asked_where_it_is_not_declared() -> None:
    subject = sinusoids(lambda d, n: Frequencies(d, n, anew=False))
    silent = Subject(kind="positions", build=subject.build, forward=subject.forward,
                     declares={"positions": "sinusoidal"})  # fmt: skip
    assert judged(silent).outcome == "OPEN"
    assert judged(silent.with_facts(half_precision=False)).outcome == "PASS"


def rotated(x: Tensor, angles: Tensor, style: str) -> Tensor:
    if style == "complex":
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    cos, sin = (torch.cat([t, t], dim=-1).to(x.dtype) for t in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Rotary(nn.Module):
    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.width, self.style = width, style

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.style == "refuses" and (x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")):
            raise NotImplementedError("not implemented for 'Half'")
        if self.style == "table" and int(positions.max()) >= 4096:
            raise IndexError("the table ends at 4096")
        counted = positions.to(x.dtype if self.style in ("few bits", "refuses") else torch.float32).float()
        rates = 1.0 / 10000.0 ** (torch.arange(0, self.width, 2).float() / self.width)
        if self.style == "einsum":
            with torch.autocast("cpu", enabled=False):
                return rotated(x, torch.einsum("t,f->tf", counted, rates), self.style)
        return rotated(x, torch.outer(counted, rates), self.style)


def rotary(style: str) -> Subject:
    return Subject(
        kind="rotary",
        build=lambda c: Rotary(c.d_head, style),
        forward=lambda m, x, positions: m(x, positions),
        declares={"half_precision": True},
    )


@pytest.mark.parametrize("style", ["complex", "halves", "einsum", "table", "refuses"])
def test_right_rotations_pass(style: str) -> None:
    assert judged(rotary(style)).outcome == "PASS"


def test_positions_in_the_dtype_of_the_queries_are_told() -> None:
    result = judged(rotary("few bits"))
    assert result.outcome == "FAIL"
    assert result.counterexample is not None
    assert "positions are counted in bfloat16" in str(result.counterexample.cause)


class Buckets(nn.Module):
    """T5's buckets by the authors' float32 formula."""

    def __init__(self, heads: int, slip: str) -> None:
        super().__init__()
        self.table, self.slip = nn.Embedding(32, heads), slip

    def forward(self, query_len: int, key_len: int) -> Tensor:
        distance = torch.arange(query_len)[:, None] - torch.arange(key_len)
        future, distance = (distance < 0).long() * 16, distance.abs()
        if self.slip == "few bits":
            distance = distance.to(self.table.weight.dtype)
        far = 8 + (torch.log(distance.float() / 8) / math.log(128 / 8) * 8).to(torch.int32).long()
        bucket = torch.where(distance < 8, distance.long(), far.clamp(max=15))
        if self.slip == "byte":
            bucket = torch.where(distance < 256, bucket, 0)
        return self.table(future + bucket).permute(2, 0, 1)


@pytest.mark.parametrize(("slip", "outcome"), [("", "PASS"), ("few bits", "PASS"), ("byte", "FAIL")])
def test_far_buckets(slip: str, outcome: str) -> None:
    """Distances of few bits are right up to 256, and beyond max_distance all share a bucket."""
    subject = Subject(
        kind="position_bias",
        build=lambda c: Buckets(c.num_heads, slip),
        forward=lambda m, t, s: m(t, s),
        declares={"positions": "t5", "bidirectional": True, "half_precision": True},
    )
    assert judged(subject).outcome == outcome


def test_places_and_angles() -> None:
    assert {255, 256, 257, 2049, 65537, 10**6 - 1} <= set(places(10**6).tolist())
    assert [len(list(right_tables(torch.arange(3), d, 1e4, ("interleaved", "halves")))) for d in (4, 5)] == [2, 15]
    x = torch.randn(1, 1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    back = turned(turned(x, torch.ones(3, 2), "halves", 1.0), torch.ones(3, 2), "halves", -1.0)
    torch.testing.assert_close(back, x)
