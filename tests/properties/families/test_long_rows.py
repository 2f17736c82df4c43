"""Kernels that take long rows in blocks: right ones of several styles pass, wrong ones fail with their block told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject, check
from veriformer.properties.definitions.losses import loss_of_rows, loss_oracle
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.results.records import FAIL, OPEN, PASS

Rows = Callable[[Tensor], Tensor]


def judged(subject: Subject, name: str) -> tuple[str, str]:
    (result,) = check(subject, only=[name], profile="quick").results
    return result.outcome, result.counterexample.cause if result.counterexample else ""


def softmax(function: Rows) -> Subject:
    return Subject(kind="softmax", forward=lambda m, x, dim=-1: function(x.movedim(dim, -1)).movedim(-1, dim))


def online(size: int) -> Rows:
    """Return a softmax with a running maximum and a running sum over blocks (Milakov & Gimelshein 2018)."""

    def run(x: Tensor) -> Tensor:
        wide = x.float() if x.itemsize < 4 else x
        top, total = torch.full_like(wide[..., :1], -torch.inf), torch.zeros_like(wide[..., :1])
        for block in wide.split(size, -1):
            above = torch.maximum(top, block.amax(-1, keepdim=True))
            safe = above.masked_fill(above == -torch.inf, 0.0)
            total = total * (top - safe).exp() + (block - safe).exp().sum(-1, keepdim=True)
            top = above
        return ((wide - top).exp() / total).to(x.dtype)

    return run


def one_by_one(x: Tensor) -> Tensor:
    """Sum a row term by term, in float32 at least."""
    wide = x.float() if x.itemsize < 4 else x
    e = (wide - wide.amax(-1, keepdim=True)).exp()
    return (e / e.cumsum(-1)[..., -1:]).to(x.dtype)


def of_pairs(x: Tensor) -> Tensor:
    """Compare each entry with each: memory grows with the square of the length."""
    wide = x.float() if x.itemsize < 4 else x
    e = (wide[..., None, :] - wide[..., :, None].masked_fill(wide[..., :, None] == -torch.inf, 0.0)).exp()
    return (1 / e.sum(-1)).masked_fill(x == -torch.inf, 0.0).to(x.dtype)


def no_longer_than(x: Tensor) -> Tensor:
    if x.shape[-1] > 1024:
        raise ValueError("rows of more than 1024 entries are not supported")
    return x.softmax(-1)


@pytest.mark.parametrize(
    "function",
    [online(16), online(1000), one_by_one, no_longer_than, lambda x: x.log_softmax(-1).exp(), lambda x: x.softmax(-1)],
)
def test_right_softmaxes_pass(function: Rows) -> None:
    assert judged(softmax(function), "softmax.long-rows")[0] == PASS


def first_maximum(x: Tensor) -> Tensor:
    e = (x - x[..., :512].amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def by_blocks(x: Tensor) -> Tensor:
    blocks = F.pad(x, (0, -x.shape[-1] % 16), value=-torch.inf).unflatten(-1, (-1, 16))
    top = blocks.amax(-1, keepdim=True)
    sums = (blocks - top).exp().sum(-1, keepdim=True)
    whole = top.amax(-2, keepdim=True)
    total = (sums * (top - whole).exp()).sum(-2, keepdim=True)
    return ((blocks - whole).exp() / total).flatten(-2)[..., : x.shape[-1]]


def in_bfloat16(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    if x.itemsize > 2:
        return e / e.sum(-1, keepdim=True)
    total = torch.zeros_like(e[..., 0])
    for n in range(x.shape[-1]):
        total = total + e[..., n]
    return e / total[..., None]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (first_maximum, "right up to 512 scores a row"),
        (lambda x: torch.cat([x[..., :64].softmax(-1), torch.zeros_like(x[..., 64:])], -1), "right up to 64"),
        (in_bfloat16, "stops growing"),
        (by_blocks, "a block of 16 subtracts its own maximum, which is -inf"),
    ],
)
def test_wrong_softmaxes_fail(function: Rows, words: str) -> None:
    outcome, cause = judged(softmax(function), "softmax.long-rows")
    assert outcome in (FAIL, OPEN)
    assert words in cause


def loss(function: Callable[[Tensor, Tensor], Tensor], **facts: object) -> Subject:
    return Subject(
        kind="loss", forward=lambda m, x, y: function(x.flatten(0, 1), y.flatten()),
        declares={"shifts_labels": False, **facts},
    )  # fmt: skip


def chunked(x: Tensor, y: Tensor) -> Tensor:
    sums = [F.cross_entropy(a, b, reduction="sum") for a, b in zip(x.split(64), y.split(64), strict=True)]
    return torch.stack(sums).sum() / (y != -100).sum()


def sharded(x: Tensor, y: Tensor) -> Tensor:
    real = y != -100
    log_z = torch.stack([part.logsumexp(-1) for part in x.split(1024, -1)]).logsumexp(0)
    terms = log_z - x.gather(-1, y.masked_fill(~real, 0)[:, None])[:, 0]
    return terms.masked_fill(~real, 0).sum() / real.sum()


def smoothed(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, label_smoothing=0.1)


@pytest.mark.parametrize("function", [chunked, sharded, F.cross_entropy])
def test_right_losses_pass(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert judged(loss(function), "loss.definition")[0] == PASS


def test_smoothing_over_a_large_vocabulary_passes() -> None:
    assert judged(loss(smoothed, label_smoothing=0.1), "loss.definition")[0] == PASS


def test_a_wrong_loss_fails() -> None:
    def forgets(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x[:128], y[:128])

    outcome, cause = judged(loss(forgets), "loss.definition")
    assert outcome == FAIL
    assert "right up to 128 tokens, wrong from 129 on" in cause


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
def test_all_positions_at_once_are_the_loop(smoothing: float, z_loss: float) -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[0, 6, -100, 2, 3], [-100, -100, 1, 5, 4]])
    value, gradient = loss_of_rows(logits, labels, smoothing, -100, z_loss)
    torch.testing.assert_close(value, loss_oracle(logits, labels, smoothing, -100, z_loss))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    total = total + z_loss * logits.logsumexp(-1)[labels != -100].square().mean()
    torch.testing.assert_close(gradient, torch.autograd.grad(total, logits)[0])


class Blockwise(nn.Module):
    """A LayerNorm that merges the statistics of blocks (Chan et al. 1979)."""

    def __init__(self, width: int, size: int, *, merges: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.size, self.merges = size, merges

    def forward(self, x: Tensor) -> Tensor:
        count, mean, squares = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
        for block in x.split(self.size, -1):
            own, many = block.mean(-1, keepdim=True), block.shape[-1]
            apart, count = own - mean, count + many
            mean = mean + apart * many / count
            squares = squares + (block - own).square().sum(-1, keepdim=True)
            if self.merges:
                squares = squares + apart.square() * many * (count - many) / count
        return self.weight * (x - mean) / (squares / count + 1e-5).sqrt() + self.bias


def norm(size: int, **given: bool) -> Subject:
    return Subject(
        kind="norm", build=lambda c: Blockwise(c.d_model, size, **given), forward=lambda m, x: m(x),
        declares={"norm": "layer"},
    )  # fmt: skip


@pytest.mark.parametrize("size", [64, 8192])
def test_a_right_norm_passes(size: int) -> None:
    assert judged(norm(size), "norm.definition")[0] == PASS


def test_a_wrong_norm_fails() -> None:
    outcome, cause = judged(norm(64, merges=False), "norm.definition")
    assert outcome == FAIL
    assert "right up to 64 channels, wrong from 65 on" in cause


def feed_forward(run: Callable[[nn.Module, Tensor], Tensor]) -> Subject:
    return Subject(
        kind="feed_forward",
        build=lambda c: nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model)),
        forward=run,
        declares={"activation": "relu", "bias": True},
    )


def in_chunks(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.flatten(0, -2).split(64)]).view_as(x)


def whole_chunks(model: nn.Module, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    parts = [model(part) if len(part) == 128 or len(rows) < 128 else part for part in rows.split(128)]
    return torch.cat(parts).view_as(x)


@pytest.mark.parametrize("name", ["ffn.position-wise", "ffn.definition"])
def test_chunks_of_tokens(name: str) -> None:
    assert judged(feed_forward(in_chunks), name)[0] == PASS
    outcome, cause = judged(feed_forward(whole_chunks), name)
    assert outcome in (FAIL, OPEN)
    assert "a last block of 128 that is not full" in cause


@pytest.mark.parametrize(
    ("is_wrong", "right", "wrong", "told"),
    [
        (lambda n: n > 100, 65, 129, "right up to 100 entries, wrong from 101 on"),
        (lambda n: n > 16 and n % 16 > 0, 10, 17, "wrong at 17, 18, 19, 20, 21, 22, 23, 24 ... (from 17 on, those "
         "that are no multiple of 16) entries, else right"),
        (lambda n: n == 2049, 1025, 2049, "right at 2048 entries, wrong at 2049"),
        (lambda n: False, 0, 17, None),
        (lambda n: True, 65, 129, None),
        (lambda n: n > 60 and n != 129, 65, 129, None),
    ],
)  # fmt: skip
def test_lengths_are_told(is_wrong: Callable[[int], bool], right: int, wrong: int, told: str | None) -> None:
    assert wrong_lengths(is_wrong, right, wrong, "entries") == told
