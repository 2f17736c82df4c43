"""What is said of gradients that are not the derivative, and that nothing is said of those that are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject, check


def causes(subject: Subject, *only: str) -> list[str]:
    report = check(subject, only=only or ("gradients.gradcheck",), profile="quick")
    return [r.counterexample.cause for r in report.results if r.counterexample]


def cause(subject: Subject, *only: str) -> str:
    found = causes(subject, *only)
    assert found, "nothing failed"
    return found[0]


class Attend(torch.autograd.Function):
    """Attention whose backward is written by hand; `slip` names what is wrong in it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slip: str) -> Tensor:
        ctx.scale, ctx.slip = q.shape[-1] ** -0.5, slip
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ keys.mT * ctx.scale
        p = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)
        ctx.save_for_backward(q, k, v, p, scores)
        return p @ values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, p, scores = ctx.saved_tensors
        slip, groups = ctx.slip, q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        p = scores.softmax(-1) if slip == "mask" else p
        dp = g @ values.mT
        delta = (dp * p).sum(-1, keepdim=True)
        ds = p * (dp if slip == "delta" else dp - delta) * ctx.scale
        dq = ds[..., 2:] @ keys[:, :, 2:] if slip == "tiles" else ds @ keys
        dk, dv = ds.mT @ q, p.mT @ g
        dq = dq * ctx.scale if slip == "scale twice" else dq / ctx.scale if slip == "scale" else dq
        dv = -dv if slip == "sign" else dv
        if groups > 1 and slip == "first head":
            return dq, dk[:, ::groups], dv[:, ::groups], None, None
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
        return (torch.ones_like(dq) if slip == "ignores" else dq), dk, dv, None, None


def attention(call: Callable[..., Tensor]) -> Subject:
    return Subject(
        kind="attention",
        build=lambda c: nn.Module(),
        forward=lambda m, q, k, v, attention_mask=None: call(q, k, v, attention_mask),
        mask_forms=("pairwise",),
        declares={"grouped_queries": True, "once_differentiable": True},
    )


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("scale", "the gradient of the queries: the scale 1 / sqrt(d_head) is missing: it is sqrt(d_head) times"),
        ("scale twice", "the scale is there twice: it is 1 / sqrt(d_head) times"),
        ("delta", "the gradient of the queries and the keys: the backward lacks the row sum of the softmax"),
        ("tiles", "only keys from 2 on count: tiles overwrite one another"),
        ("sign", "the gradient of the values: it has the wrong sign"),
    ],
)
def test_what_is_wrong_in_a_backward_of_attention_is_named(slip: str, words: str) -> None:
    told = cause(attention(lambda q, k, v, mask: Attend.apply(q, k, v, mask, slip)))
    assert words in told
    assert "in the backward of Attend, written by hand" in told


def test_a_mask_that_the_backward_forgets_is_told_with_its_condition() -> None:
    told = cause(
        attention(lambda q, k, v, mask: Attend.apply(q, k, v, mask, "mask")), "attention.masked-equals-removed"
    )
    assert "the backward forgets the mask" in told
    assert "wrong with a mask, right without" in told


def test_heads_of_a_group_that_are_not_summed() -> None:
    told = cause(
        attention(lambda q, k, v, mask: Attend.apply(q, k, v, mask, "first head")), "attention.grouped-queries"
    )
    assert "the gradient of the keys and the values: only the first query head of each group counts" in told


def test_a_right_backward_gets_no_cause() -> None:
    subject = attention(lambda q, k, v, mask: Attend.apply(q, k, v, mask, ""))
    assert causes(subject, "gradients.gradcheck", "attention.grouped-queries", "attention.masked-equals-removed") == []


def softly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cut: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -1e30)
    scores = scores - scores.amax(-1, keepdim=True).detach()  # harmless: the maximum cancels
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if cut and k.shape[2] > 3:
        total = total.detach()
    return weights / total @ v


def test_the_detach_that_matters_is_told_among_harmless_ones_and_from_which_length_on() -> None:
    told = cause(attention(lambda q, k, v, mask: softly(q, k, v, mask, True)))
    assert told.startswith("`total = total.detach()` (test_gradients.py:")
    assert "in softly) cuts the graph" in told
    assert "right up to 3 keys, wrong from 4 on" in told
    assert causes(attention(lambda q, k, v, mask: softly(q, k, v, mask, False))) == []


def wrongly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -1e30)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + 1) @ v


def test_where_the_output_is_wrong_no_backward_is_blamed() -> None:
    told = cause(attention(wrongly))
    assert "cuts" not in told
    assert "the denominator is wrong" in told


class Linear2(nn.Module):
    """Two linear maps with something in between."""

    def __init__(self, width: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(width, width), nn.Linear(width, width), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def network(between: Callable[[Tensor], Tensor]) -> Subject:
    return Subject(kind="feed_forward", build=lambda c: Linear2(c.d_model, between), forward=lambda m, x: m(x))


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return g[0] * ctx.saved_tensors[0].sigmoid()


def hooked(x: Tensor) -> Tensor:
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return y


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = x.mean(-1, keepdim=True)
    return x * gate


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (Silu.apply, "not the derivative of SiLU: the term x * sigmoid(x) * (1 - sigmoid(x)) is missing"),
        (lambda x: x * x.norm().item(), "x.norm().item()"),
        (lambda x: x * x.data.sigmoid(), "a part of the gradient"),
        (hooked, "changes the gradient"),
        (without_gradients, "`with torch.no_grad()`"),
    ],
)
def test_what_is_wrong_inside_a_model_is_named(between: Callable[[Tensor], Tensor], words: str) -> None:
    assert words in cause(network(between))


def test_a_straight_derivative_gets_no_cause() -> None:
    assert causes(network(nn.functional.silu)) == []


def test_a_backward_that_ignores_what_comes_in_is_told() -> None:
    subject = Subject(
        kind="loss",
        build=lambda c: nn.Module(),
        forward=lambda m, logits, labels: Fused.apply(logits, labels),
        declares={"once_differentiable": True},
    )
    assert "the backward of Fused, written by hand, does not multiply by the gradient that comes in" in cause(subject)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = nn.functional.cross_entropy(leaf.flatten(0, 1), labels.flatten())
            ctx.save_for_backward(*torch.autograd.grad(loss, leaf))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class Norm(nn.Module):
    """RMSNorm whose root mean square is brought out of the graph by way of numpy, which nothing can undo."""

    def forward(self, x: Tensor) -> Tensor:
        root = x.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        return x / torch.from_numpy(root.detach().numpy().copy())


class Behind(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = Norm(), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


def test_the_part_whose_gradient_is_wrong_by_itself_is_named() -> None:
    subject = Subject(kind="feed_forward", build=lambda c: Behind(c.d_model), forward=lambda m, x: m(x))
    told = cause(subject)
    assert "the gradient of norm (Norm) that is wrong, called by itself too" in told
    assert "the term of the root mean square, x_hat * mean(g * gain * x_hat), is missing" in told


class Remembering(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.shape != x.shape:
            self.kept = self.first(x)
        return self.second(self.kept)


def test_what_is_kept_from_an_earlier_call_is_told() -> None:
    subject = Subject(kind="feed_forward", build=lambda c: Remembering(c.d_model), forward=lambda m, x: m(x))
    told = cause(subject)
    assert "what an earlier call made is kept and used again" in told
    assert "first is not called a second time" in told


class Redrawing(nn.Module):
    def __init__(self, width: int, rate: float, keeps: bool) -> None:
        super().__init__()
        self.inner, self.drop, self.keeps = nn.Linear(width, width), nn.Dropout(rate), keeps

    def run(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x)).sin()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=self.keeps)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_recomputation_that_draws_anew_is_told(keeps: bool) -> None:
    subject = Subject(
        kind="feed_forward",
        build=lambda c: Redrawing(c.d_model, c.dropout, keeps),
        forward=lambda m, x: m(x),
    )
    told = causes(subject, "dropout.gradient")
    assert told == [] if keeps else "computes again (checkpointing: inner, drop)" in told[0]


class Stack(nn.Module):
    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.way == "never called":
            return self.head(y)
        normed = self.norm(y)
        if self.way == "cut":
            normed = normed.detach()
        return self.head(y if self.way == "not used" else normed)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("never called", "norm (LayerNorm) is never called"),
        ("not used", "norm (LayerNorm) is called, and nothing uses the result: head (Linear) is given what norm gets"),
        ("cut", "`normed = normed.detach()`"),
    ],
)
def test_why_parameters_are_not_connected(way: str, words: str) -> None:
    subject = Subject(kind="feed_forward", build=lambda c: Stack(c.d_model, way), forward=lambda m, x: m(x))
    assert words in cause(subject, "parameters.all-used")


class Own(nn.Module):
    """Self-attention around the attention above."""

    def __init__(self, width: int, heads: int, slip: str) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.slip = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, slip

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if attention_mask is None else attention_mask[:, None, None]
        return self.out(Attend.apply(q, k, v, mask, self.slip).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("scale", "the gradient of q: the scale 1 / sqrt(d_head) is missing"),
        ("delta", "the gradient of q, k: the backward lacks the row sum of the softmax"),
    ],
)
def test_a_backward_inside_a_model_is_judged_by_itself(slip: str, words: str) -> None:
    subject = Subject(
        kind="self_attention",
        build=lambda c: Own(c.d_model, c.num_heads, slip),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"once_differentiable": True},
        domain={"num_heads": [1, 2, 4]},
    )
    assert words.replace("q, k", "q and k") in cause(subject)


class Dropping(torch.autograd.Function):
    """The mask of dropout is drawn again from its seed, the other way round if `turned`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rate: float, turned: bool) -> Tensor:
        p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        ctx.seed, ctx.rate, ctx.turned = int(torch.randint(2**31, ())), rate, turned
        ctx.save_for_backward(q, k, v, p)
        return p * kept(ctx.seed, p.shape, rate).to(p.dtype) @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        shape = (*p.shape[:2], p.shape[3], p.shape[2]) if ctx.turned else p.shape
        mask = kept(ctx.seed, shape, ctx.rate).to(p.dtype)
        mask = mask.mT if ctx.turned else mask
        dp = g @ v.mT * mask
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, (p * mask).mT @ g, None, None


def kept(seed: int, shape: tuple[int, ...], rate: float) -> Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn >= rate).double() / (1 - rate)


class Dropper(nn.Module):
    def __init__(self, rate: float, turned: bool) -> None:
        super().__init__()
        self.rate, self.turned = rate, turned

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = self.rate if self.training else 0.0
        return Dropping.apply(q, k, v, rate, self.turned).to(q.dtype)


@pytest.mark.parametrize("turned", [False, True])
def test_a_mask_that_is_drawn_in_another_order_is_told(turned: bool) -> None:
    subject = Subject(
        kind="attention",
        build=lambda c: Dropper(c.dropout, turned),
        forward=lambda m, q, k, v: m(q, k, v),
        declares={"once_differentiable": True},
    )
    told = causes(subject, "dropout.gradient")
    assert ("in the order [B, H, S, T], the forward in [B, H, T, S]" in told[0]) if turned else told == []


def emptied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    return weights.nan_to_num(0.0) @ v


def test_the_line_that_makes_the_first_nan_of_a_gradient_is_told() -> None:
    told = cause(attention(emptied), "attention.empty-row")
    assert "the backward of softmax at `weights = scores.softmax(-1)` (test_gradients.py:" in told
    assert "gives NaN for a row that has no key" in told
