"""Right kernels as they are written for speed: tiles, halves, partial softmaxes, gradients that are made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _hidden(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Return what is hidden, `[B or 1, 1, T, S]`."""
    if not causal:
        return None if mask is None else ~mask
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    return future if mask is None else future | ~mask


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def _attention(kernel: Kernel, **facts: Any) -> Subject:
    def forward(
        m: None, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        return kernel(q, k, v, attention_mask, causal)

    declares = {"empty_row": "zeros", "causal_alignment": "bottom-right"} | facts
    return Subject(kind="attention", forward=forward, mask_forms=("pairwise",), declares=declares)


@trap("kernel-base-two", "Powers of two with log2(e) in the scale, weights rounded to half, one division at the end")
def base_two() -> Subject:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        hidden = _hidden(q, k, mask, causal)
        top = _wide(torch.full_like(q[..., :1], -torch.inf))
        total, sums = torch.zeros_like(top), _wide(q[..., :1] * v[:, :, :1]) * 0
        for start in range(0, k.shape[2], 128):
            at = slice(start, start + 128)
            s = _wide(q @ k[:, :, at].mT) * (q.shape[-1] ** -0.5 * math.log2(math.e))
            if hidden is not None:
                s = s.masked_fill(hidden[..., at], -torch.inf)
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            base = new.masked_fill(new == -torch.inf, 0.0)
            p, old = (s - base).exp2(), (top - base).exp2()
            top, total = new, total * old + p.sum(-1, keepdim=True)
            sums = sums * old + _wide(p.to(v.dtype) @ v[:, :, at])
        return (sums / total.masked_fill(total == 0, 1.0)).to(q.dtype)

    return _attention(kernel)


@trap(
    "kernel-sample-loop",
    "Samples one after another, each with its own mask of queries and keys, cut into blocks of keys",
)
def sample_loop() -> Subject:
    def one(q: Tensor, k: Tensor, v: Tensor, allow: Tensor | None) -> Tensor:
        blocks = []
        for start in range(0, k.shape[1], 48):
            scores = _wide(q) @ _wide(k[:, start : start + 48]).mT * q.shape[-1] ** -0.5
            shown = None if allow is None else allow[:, start : start + 48]
            blocks.append(scores if shown is None else scores.masked_fill(~shown, -torch.inf))
        return torch.cat(blocks, -1).softmax(-1).nan_to_num(0.0) @ _wide(v)

    def forward(
        m: None, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        flag = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril() if causal else None
        masks = [None] * len(q) if attention_mask is None else attention_mask.expand(len(q), -1, -1)
        own = [flag if a is None else a if flag is None else a & flag for a in masks]
        return torch.stack([one(*x) for x in zip(q, k, v, own, strict=True)]).to(q.dtype)

    return Subject(
        kind="attention", forward=forward, declares={"empty_row": "zeros", "causal_alignment": "top-left"}
    )  # fmt: skip


@trap("kernel-split-keys", "Keys split in three, partial outputs stored in the inputs' dtype, joined by log-sum-exp")
def split_keys() -> Subject:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        hidden = _hidden(q, k, mask, causal)
        each = -(-k.shape[2] // 3)
        outputs, sizes = [], []
        for start in range(0, k.shape[2], each):
            at = slice(start, start + each)
            s = _wide(q @ k[:, :, at].mT) * q.shape[-1] ** -0.5
            s = s if hidden is None else s.masked_fill(hidden[..., at], -torch.inf)
            size = s.logsumexp(-1, keepdim=True)
            weights = (s - size.masked_fill(size == -torch.inf, 0.0)).exp()
            outputs.append((weights @ _wide(v[:, :, at])).to(q.dtype))
            sizes.append(size)
        factors = torch.stack(sizes).softmax(0).nan_to_num(0.0)
        return (torch.stack([_wide(x) for x in outputs]) * factors).sum(0).to(q.dtype)

    return _attention(kernel)


@trap("kernel-scaled-halves", "Queries and keys scaled by the fourth root of d_head, products and weights kept in half")
def scaled_halves() -> Subject:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        root = q.shape[-1] ** -0.25
        scores, hidden = (q * root) @ (k * root).mT, _hidden(q, k, mask, causal)
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v

    return _attention(kernel)


class _Flash(torch.autograd.Function):
    """Tiles of 48 queries and 80 keys, groups unrepeated; the backward goes over the keys first."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:  # type: ignore[override]
        scores = _scores(q, k, hidden)
        size = scores.logsumexp(-1, keepdim=True)
        outputs = []
        for start in range(0, q.shape[2], 48):
            s = scores[..., start : start + 48, :] - size[..., start : start + 48, :].clamp(min=-1e30)
            outputs.append(s.exp() @ _wide(v)[:, :, None])
        out = torch.cat(outputs, -2)
        ctx.save_for_backward(q, k, v, out, size, hidden)
        return out.flatten(1, 2).to(q.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, size, hidden = ctx.saved_tensors
        grouped = q.unflatten(1, (k.shape[1], -1))
        g = _wide(g).unflatten(1, (k.shape[1], -1))
        mean = (g * out).sum(-1, keepdim=True)
        d_q, d_k, d_v = torch.zeros_like(_wide(grouped)), [], []
        for start in range(0, k.shape[2], 80):
            at = slice(start, start + 80)
            part = None if hidden is None else hidden[..., at]
            p = (_scores(q, k[:, :, at], part) - size.clamp(min=-1e30)).exp()
            d_s = p * (g @ _wide(v[:, :, None, at]).mT - mean) * q.shape[-1] ** -0.5
            d_q += d_s @ _wide(k[:, :, None, at])
            d_k.append((d_s.mT @ _wide(grouped)).sum(2))
            d_v.append((p.mT @ g).sum(2))
        return (
            d_q.flatten(1, 2).to(q.dtype), torch.cat(d_k, 2).to(k.dtype), torch.cat(d_v, 2).to(v.dtype), None,
        )  # fmt: skip


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """Return scores `[B, G, H / G, T, S]`."""
    s = _wide(q).unflatten(1, (k.shape[1], -1)) @ _wide(k)[:, :, None].mT * q.shape[-1] ** -0.5
    if hidden is None:
        return s
    return s.masked_fill(hidden if hidden.ndim == 2 else hidden[:, :, None], -torch.inf)


@trap("kernel-by-hand", "Tiles that differ for queries and keys, a backward by hand that goes over the keys first")
def by_hand() -> Subject:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        out: Tensor = _Flash.apply(q, k, v, _hidden(q, k, mask, causal))  # type: ignore[no-untyped-call]
        return out

    return _attention(kernel, grouped_queries=True, once_differentiable=True)


@trap("kernel-window-skips", "A window of 70 keys: tiles of 32 outside of it are never computed")
def window_skips() -> Subject:
    window, block = 70, 32

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if not causal:
            hidden = _hidden(q, k, mask, False)
            s = _wide(q) @ _wide(k).mT * q.shape[-1] ** -0.5
            s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
            return (s.softmax(-1).nan_to_num(0.0) @ _wide(v)).to(q.dtype)
        rows, shift = [], k.shape[2] - q.shape[2]
        for start in range(0, q.shape[2], block):
            stop = min(start + block, q.shape[2])
            first, last = max(start + shift - window + 1, 0), max(stop + shift, 0)
            at = torch.arange(start, stop, device=q.device)[:, None] + shift
            to = torch.arange(first, last, device=q.device)
            hidden = (to > at) | (to <= at - window)
            if mask is not None:
                hidden = hidden | ~mask[:, :, start:stop, first:last]
            s = _wide(q[:, :, start:stop]) @ _wide(k[:, :, first:last]).mT * q.shape[-1] ** -0.5
            weights = s.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
            rows.append((weights @ _wide(v[:, :, first:last])).to(q.dtype))
        return torch.cat(rows, 2)

    return _attention(kernel, window=window)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        wide, count = _wide(x), 0
        mean, squares = torch.zeros_like(wide[..., :1]), torch.zeros_like(wide[..., :1])
        for block in wide.split(96, -1):
            n = block.shape[-1]
            own = block.mean(-1, keepdim=True)
            apart = own - mean
            squares = squares + (block - own).square().sum(-1, keepdim=True) + apart**2 * (count * n / (count + n))
            mean, count = mean + apart * (n / (count + n)), count + n
        scale = (squares / count + 1e-5).rsqrt()
        ctx.save_for_backward(x, gain, mean, scale)
        return ((wide - mean) * scale).to(x.dtype) * gain + bias

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, gain, mean, scale = ctx.saved_tensors
        n, g_n = (_wide(x) - mean) * scale, _wide(g * gain)
        d_x = scale * (g_n - g_n.mean(-1, keepdim=True) - n * (g_n * n).mean(-1, keepdim=True))
        return d_x.to(x.dtype), *(_wide(y).flatten(0, -2).sum(0).to(gain.dtype) for y in (g * n, g))


@trap("kernel-merged-norm", "A norm that merges means and squares of blocks of 96 channels, its gradient by hand")
def merged_norm() -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _Norm.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return out

    facts = {"norm": "layer", "once_differentiable": True}
    return Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x), declares=facts)


class _Loss(torch.autograd.Function):
    """Chunks of 48 tokens and blocks of 1000 ids; the gradient is made in the forward, in the logits' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        count, slopes = (y != -100).sum().clamp(min=1), []
        total = torch.zeros((), dtype=_wide(x[:0]).dtype, device=x.device)
        for rows, labels in zip(x.split(48), y.split(48), strict=True):
            real, wide = labels != -100, _wide(rows)
            log_z = torch.stack([block.logsumexp(-1) for block in wide.split(1000, -1)]).logsumexp(0)
            at = labels.masked_fill(~real, 0)[:, None]
            total = total + ((log_z - wide.gather(-1, at)[:, 0]) * real).sum()
            slope = (wide - log_z[:, None]).exp().scatter_add(-1, at, -torch.ones_like(wide[:, :1]))
            slopes.append((slope * real[:, None] / count).to(x.dtype))
        ctx.save_for_backward(torch.cat(slopes))
        return total / count

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (slopes,) = ctx.saved_tensors
        return slopes * g, None


@trap("kernel-fused-loss", "A loss in chunks of tokens and blocks of ids that makes its gradient in the forward")
def fused_loss() -> Subject:
    return Subject(
        kind="loss",
        forward=lambda m, x, y: _Loss.apply(x.flatten(0, 1), y.flatten()),  # type: ignore[no-untyped-call]
        declares={"shifts_labels": False, "once_differentiable": True},
    )


@trap("kernel-blocks-of-a-row", "A softmax in two passes over blocks of 200 entries, hidden blocks passed over")
def blocks_of_a_row() -> Subject:
    def forward(m: None, scores: Tensor, dim: int = -1) -> Tensor:
        rows = _wide(scores.movedim(dim, -1))
        top, total = torch.full_like(rows[..., :1], -torch.inf), torch.zeros_like(rows[..., :1])
        for block in rows.split(200, -1):
            own = block.detach().amax(-1, keepdim=True)
            new = torch.maximum(top, own)
            base = new.masked_fill(new == -torch.inf, 0.0)
            total = torch.where(
                own == -torch.inf, total, total * (top - base).exp() + (block - base).exp().sum(-1, keepdim=True)
            )
            top = new
        out = torch.cat([(block - top).exp() / total for block in rows.split(200, -1)], -1)
        return out.to(scores.dtype).movedim(-1, dim)

    return Subject(kind="softmax", forward=forward)


@trap("kernel-chunked-network", "A feed-forward network in chunks of 40 tokens and blocks of 72 hidden units")
def chunked_network() -> Subject:
    class Network(nn.Module):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.of(part) for part in x.flatten(0, -2).split(40)]).view_as(x)

        def of(self, tokens: Tensor) -> Tensor:
            parts = zip(
                self.up.weight.split(72), self.up.bias.split(72), self.down.weight.split(72, 1), strict=True
            )  # fmt: skip
            return self.down.bias + sum(F.relu(F.linear(tokens, a, b)) @ c.mT for a, b, c in parts)

    return Subject(
        kind="feed_forward", build=lambda c: Network(c.d_model, c.d_ff), forward=lambda m, x: m(x),
        declares={"activation": "relu", "bias": True},
    )  # fmt: skip
