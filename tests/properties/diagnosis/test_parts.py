"""Small kinds: the one wrong formula that gives a subject's numbers is named, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.subject.subject import Subject
from veriformer.reference.position_bias import alibi_slopes, t5_bucket


def cause(subject: Subject, identifier: str, profile: str = "quick") -> str:
    judge = Judge(subject, Settings(profile=profile, named=(identifier,)))
    result = [judge.judge(prop) for prop in named((identifier,))][-1]
    return result.counterexample.cause if result.counterexample else result.outcome


def smoothed(logits: Tensor, labels: Tensor, slip: str) -> Tensor:
    eps, log_p, real = 0.1, logits.log_softmax(-1), labels != -100
    nll, smooth = -log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -log_p.mean(-1)
    if slip == "others":
        smooth = (-log_p.sum(-1) - nll) / (logits.shape[-1] - 1)
    if slip == "whole weight":
        return ((nll + eps * smooth) * real).sum() / real.sum()
    if slip == "ignored smoothed":
        return ((1 - eps) * (nll * real).sum() + eps * smooth.sum()) / real.sum()
    terms = ((1 - eps) * nll + eps * smooth) * real
    if slip == "samples":
        return (terms.sum(1) / real.sum(1)).mean()
    return terms.sum() / {"all": real.numel(), "batch": len(labels), "two": real.sum() * math.log(2)}.get(
        slip, real.sum()
    )


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("", "PASS"),
        ("others", "the smoothing is spread over the other V - 1 labels"),
        ("whole weight", "the likelihood keeps its whole weight"),
        ("ignored smoothed", "the smoothing term is summed over all positions, ignored ones included"),
        ("samples", "a mean over each sample is taken first"),
        ("all", "the sum is divided by all positions"),
        ("batch", "divided by the number of samples"),
        ("two", "the logarithm has base 2"),
    ],
)
def test_the_formula_of_a_loss_is_named(slip: str, said: str) -> None:
    subject = Subject(
        kind="loss",
        build=lambda c: nn.Identity(),
        forward=lambda m, logits, labels: smoothed(logits, labels, slip),
        declares={"label_smoothing": 0.1, "shifts_labels": False, "ignore_index": -100},
    )
    assert said in cause(subject, "loss.definition")


def accumulated(pairs: list[tuple[Tensor, Tensor]], slip: str) -> Tensor:
    sums = [smoothed(x, y, "") * (y != -100).sum() for x, y in pairs]
    counts = [(y != -100).sum() for _, y in pairs]
    if slip == "means":
        return torch.stack([s / n for s, n in zip(sums, counts, strict=True)]).mean()
    if slip == "last count":
        return torch.stack(sums).sum() / counts[-1]
    return torch.stack(sums).sum() / torch.stack(counts).sum()


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("", "PASS"),
        ("means", "the mean of the micro-batches' means"),
        ("last count", "the count of the last micro-batch"),
    ],
)
def test_how_micro_batches_are_put_together_is_named(slip: str, said: str) -> None:
    subject = Subject(
        kind="loss",
        build=lambda c: nn.Identity(),
        forward=lambda m, logits, labels: smoothed(logits, labels, ""),
        accumulate=lambda m, pairs: accumulated(pairs, slip),
        declares={"label_smoothing": 0.1, "shifts_labels": False, "ignore_index": -100},
    )
    assert said in cause(subject, "loss.accumulation")


def turned(x: Tensor, positions: Tensor, slip: str) -> Tensor:
    width = x.shape[-1]
    base = 1000.0 if slip == "base" else 10000.0
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / (2 * width if slip == "width" else width)
    rates = base**-exponent
    at = positions.to(torch.float64) + (slip == "one on")
    if slip == "index":
        at = torch.arange(x.shape[2], dtype=torch.float64)
    angles = at[:, None] * rates
    if slip == "half":
        angles = at.to(x.dtype)[:, None] * rates.to(x.dtype)
    angles = angles.to(torch.float64)
    angles = angles.repeat_interleave(2, -1) if slip == "mixed" else torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    other = torch.cat([second if slip == "reflection" else -second, first], -1)
    return x * angles.cos().to(x.dtype) + other * angles.sin().to(x.dtype)


@pytest.mark.parametrize(
    ("slip", "identifier", "said"),
    [
        ("", "rotary.composition", "PASS"),
        ("mixed", "rotary.composition", "the layouts are mixed"),
        ("one on", "rotary.identity", "position p is rotated as p + 1"),
        ("index", "rotary.composition", "a token turns by its index in the sequence"),
        ("reflection", "rotary.isometry", "the same sign: that is no rotation"),
        ("base", "rotary.frequencies", "the base is 1000 instead of 10000"),
        ("half", "numerics.precision-ladder", "positions and frequencies are rounded to it before"),
        ("", "numerics.precision-ladder", "PASS"),
    ],
)
def test_the_formula_of_a_rotation_is_named(slip: str, identifier: str, said: str) -> None:
    subject = Subject(
        kind="rotary",
        build=lambda c: nn.Identity(),
        forward=lambda m, x, positions: turned(x, positions, slip),
        declares={"positions": "rotary", "layout": "halves", "half_precision": True},
        domain={"d_model": [16, 32], "num_heads": [2]},
    )
    assert said in cause(subject, identifier)


def buckets(distance: Tensor, slip: str) -> Tensor:
    if slip == "sign":
        distance = -distance
    if slip == "log":
        exact = 4
        back = (-distance).clamp(min=0)
        far = (exact + (back.clamp(min=1).double() / exact).log() / math.log(40 / 8) * 4).long().clamp(max=7)
        return torch.where(back < exact, back, far)
    return t5_bucket(distance, bidirectional=False, num_buckets=8, max_distance=80 if slip == "far" else 40)


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("", "PASS"),
        ("sign", "the sign of the distance is swapped"),
        ("log", "divided by log(max_distance / num_buckets)"),
        ("far", "the last bucket begins at distance 80 instead of 40"),
    ],
)
def test_the_rule_of_t5_buckets_is_named(slip: str, said: str) -> None:
    def bias(table: nn.Embedding, queries: int, keys: int) -> Tensor:
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        return table(buckets(distance, slip)).permute(2, 0, 1)

    subject = Subject(
        kind="position_bias",
        build=lambda c: nn.Embedding(8, c.num_heads),
        forward=bias,
        declares={"positions": "t5", "bidirectional": False, "num_buckets": 8, "max_distance": 40},
    )
    assert said in cause(subject, "t5.buckets")


@pytest.mark.parametrize(
    ("slopes", "said"),
    [
        (lambda heads: alibi_slopes(heads), "PASS"),
        (lambda heads: [2.0 ** (-8 * i / heads) for i in range(heads)], "with i from 0"),
        (lambda heads: alibi_slopes(heads)[::-1], "reverse order of heads"),
        (lambda heads: [2 * slope for slope in alibi_slopes(heads)], "2 times those of the paper"),
    ],
)
def test_the_rule_of_alibi_slopes_is_named(slopes: Callable[[int], list[float]], said: str) -> None:
    def bias(heads: nn.Module, queries: int, keys: int) -> Tensor:
        distance = (torch.arange(keys)[None] - torch.arange(queries)[:, None]).abs()
        return -torch.tensor(slopes(heads.out_features))[:, None, None] * distance  # type: ignore[arg-type]

    subject = Subject(
        kind="position_bias",
        build=lambda c: nn.Linear(1, c.num_heads),
        forward=bias,
        declares={"positions": "alibi"},
        domain={"num_heads": [2, 4]},
    )
    assert said in cause(subject, "alibi.slopes")


class Norm(nn.Module):
    def __init__(self, width: int, slip: str) -> None:
        super().__init__()
        self.gain, self.bias, self.slip = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), slip

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        if self.slip == "one pass":
            variance = (x * x).mean(-1, keepdim=True) - mean * mean
        if self.slip == "mean square":
            variance = (x * x).mean(-1, keepdim=True)
        if self.slip == "outside":
            return self.gain * (x - mean) / (variance.sqrt() + 1e-3) + self.bias
        if self.slip == "variance":
            return self.gain * (x - mean) / (variance + 1e-5) + self.bias
        return self.gain * (x - mean) / (variance + 1e-5).sqrt() + self.bias


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("", "PASS"),
        ("one pass", "the variance is E[x^2] - E[x]^2 and cancels"),
        ("mean square", "the mean is subtracted above the line alone"),
        ("outside", "is added to the standard deviation, outside the root"),
        ("variance", "divided by the variance, not by its root"),
    ],
)
def test_the_formula_of_a_norm_is_named(slip: str, said: str) -> None:
    subject = Subject(
        kind="norm", build=lambda c: Norm(c.d_model, slip), forward=lambda m, x: m(x), declares={"norm": "layer"}
    )
    assert said in cause(subject, "norm.definition", "standard")


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (nn.functional.gelu, "PASS"),
        (nn.functional.silu, "it computes silu"),
        (lambda x: x * torch.sigmoid(1.702 * x), "1.702"),
        (lambda x: nn.functional.gelu(nn.functional.gelu(x)), "gelu is applied twice"),
    ],
)
def test_the_activation_is_named(act: Callable[[Tensor], Tensor], said: str) -> None:
    subject = Subject(
        kind="feed_forward",
        build=lambda c: FeedForward(c.d_model, c.d_ff, act),
        forward=lambda m, x: m(x),
        declares={"activation": "gelu", "structure": "textbook"},
    )
    assert said in cause(subject, "ffn.definition")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (str.split, "a blank between words"),
        (lambda text: [text], "PASS"),
        (lambda text: [text.lower()], "capitals"),
    ],
)
def test_what_a_tokenizer_loses_is_named(pattern: Callable[[str], list[str]], said: str) -> None:
    subject = Subject(
        kind="tokenizer",
        build=lambda c: None,
        forward=lambda m, text: [ord(c) for word in pattern(text) for c in word],
        decode=lambda m, ids: "".join(map(chr, ids)),
        declares={"reversible": True},
    )
    assert said in cause(subject, "tokenizer.round-trip")


def named_groups(model: nn.Module, exempt: Callable[[str], bool], skip: str = "") -> Iterator[dict[str, object]]:
    named_ones = [(name, p) for name, p in model.named_parameters() if not skip or skip not in name]
    yield {"params": [p for name, p in named_ones if not exempt(name)], "weight_decay": 0.1}
    yield {"params": [p for name, p in named_ones if exempt(name)], "weight_decay": 0.0}


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, width))
        self.map, self.ln = nn.Linear(width, width), nn.LayerNorm(width)


@pytest.mark.parametrize(
    ("exempt", "skip", "said"),
    [
        (lambda name: "ln" in name or "bias" in name, "", "PASS"),
        (lambda name: "bias" in name, "", "no 'norm' stands in their names"),
        (lambda name: "ln" in name or "bias" in name, "start", "a bare parameter of Small itself"),
    ],
)
def test_why_a_parameter_stands_in_the_wrong_group_is_said(exempt: Callable[[str], bool], skip: str, said: str) -> None:
    subject = Subject(
        kind="parameter_groups", build=lambda c: Small(c.d_model), forward=lambda m: list(named_groups(m, exempt, skip))
    )
    assert said in cause(subject, "schedule.decay-groups")


@pytest.mark.parametrize(
    ("offset", "said"), [(2, "PASS"), (1, "position 0 reads row 1"), (0, "positions begin at row 0 of the table")]
)
def test_which_row_of_a_table_is_read_is_said(offset: int, said: str) -> None:
    subject = Subject(
        kind="positions",
        build=lambda c: nn.Embedding(c.max_len + 2, c.d_model, padding_idx=1),
        forward=lambda m, length: m(torch.arange(offset, offset + length)),
        declares={"positions": "learned", "position_offset": 2, "beyond_max_len": "error"},
    )
    assert said in cause(subject, "learned.table")
