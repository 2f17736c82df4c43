"""Faults of blocks and tables: the first block's mask for all, filled lanes, places by a length, sorted rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class _Streamed(nn.Module):
    """Cross-attention that goes over the memory in blocks of four."""

    def __init__(self, c: DrawnConfig, seen_of: Callable[[Tensor, int, int], Tensor]) -> None:
        super().__init__()
        self.heads, self.seen_of = c.num_heads, seen_of
        self.q, self.kv, self.out = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, 2 * c.d_model), nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        top = q.new_full((*q.shape[:-1], 1), torch.finfo(q.dtype).min)
        total, mixed = torch.zeros_like(top), torch.zeros_like(q)
        for at in range(0, memory.shape[1], 4):
            keys, values = k[:, :, at : at + 4], v[:, :, at : at + 4]
            scores = q @ keys.mT * q.shape[-1] ** -0.5
            if mask is not None:
                shown = self.seen_of(mask, at, keys.shape[2])[:, None, None]
                scores = scores.masked_fill(~shown, torch.finfo(q.dtype).min)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            fade, weights = (top - new).exp(), (scores - new).exp()
            total, mixed = total * fade + weights.sum(-1, keepdim=True), mixed * fade + weights @ values
            top = new
        y: Tensor = (mixed / total).transpose(1, 2).flatten(2)
        return y


@fault(
    "FB-mask",
    "Every block of the memory is masked by the first entries of the mask",
    killed_by=("padding.content-irrelevant",),
    cause="those of the first block",
)
def first_entries_for_all_blocks() -> Subject:
    seen: Callable[[Tensor, int, int], Tensor] = put(
        lambda mask, at, many: mask[:, :many], instead_of=lambda mask, at, many: mask[:, at : at + many]
    )
    return Subject(
        kind="cross_attention", build=lambda c: _Streamed(c, seen),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
        declares={"structure": "other"},
    )  # fmt: skip


@fault(
    "FB-lanes",
    "What fills a row up to a power of two is 0, and the sum of exponentials counts it",
    killed_by=("softmax.simplex",),
    cause="scores of 0 that fill up the last block",
)
def lanes_of_zero() -> Subject:
    fill: float = put(0.0, instead_of=float("-inf"))

    def softmax(m: Any, scores: Tensor, dim: int = -1) -> Tensor:
        x = scores.movedim(dim, -1)
        width = 1 << (x.shape[-1] - 1).bit_length()
        lanes = F.pad(x, (0, width - x.shape[-1]), value=fill)
        top = x.amax(-1, keepdim=True)
        top = torch.where(top.isfinite(), top, 0.0)
        weights = (lanes - top).exp()
        made: Tensor = weights[..., : x.shape[-1]] / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return made.movedim(-1, dim)

    return Subject(kind="softmax", forward=softmax, declares={"half_precision": False})


class _Table(nn.Module):
    """A learned bias for each distance."""

    def __init__(self, c: DrawnConfig, middle: Callable[[_Table, int], int]) -> None:
        super().__init__()
        self.longest, self.middle = c.max_len, middle
        self.table = nn.Parameter(torch.zeros(c.num_heads, 2 * c.max_len - 1))

    def forward(self, queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        at = (apart + self.middle(self, max(queries, keys))).clamp(0, 2 * self.longest - 2)
        return self.table[:, at.to(self.table.device)]


@fault(
    "RB-by-length",
    "Distances are counted from the length of the call, and a table has its middle elsewhere",
    killed_by=("position-bias.relative",),
    cause="goes by the call's length",
)
def places_by_length() -> Subject:
    middle: Callable[[_Table, int], int] = put(lambda m, n: n - 1, instead_of=lambda m, n: m.longest - 1)
    return Subject(
        kind="position_bias", build=lambda c: _Table(c, middle), forward=lambda m, queries, keys: m(queries, keys),
        declares={"positions": "relative", "bidirectional": True},
    )  # fmt: skip


class _Stacked(nn.Module):
    """Two of four experts for each token, their weights in one tensor."""

    def __init__(self, c: DrawnConfig, gather: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gather, self.router = gather, nn.Linear(c.d_model, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, c.d_model, c.d_ff) * c.d_model**-0.5)
        self.down = nn.Parameter(torch.randn(4, c.d_ff, c.d_model) * c.d_ff**-0.5)

    def weights(self, x: Tensor) -> Tensor:
        best, which = self.router(x).softmax(-1).topk(2, dim=-1)
        return torch.zeros(*x.shape[:-1], 4).to(best).scatter(-1, which, best / best.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, out = self.weights(tokens), torch.zeros_like(tokens)
        for number in range(4):
            rows = weights[:, number].nonzero().flatten()
            part = F.gelu(tokens[rows] @ self.up[number]) @ self.down[number]
            out = self.gather(out, rows, part * weights[rows, number, None])
        return out.view_as(x)


@fault(
    "RT-stacked-over",
    "What a second expert gives for a token stands in the place of what the first gave",
    killed_by=("router.weights",),
    cause="overwrite one another|the last of what is written alone is left",
)
def stacked_experts_overwrite() -> Subject:
    gather: Callable[[Tensor, Tensor, Tensor], Tensor] = put(
        lambda out, rows, part: out.index_copy(0, rows, part),
        instead_of=lambda out, rows, part: out.index_add(0, rows, part),
    )
    return Subject(
        kind="feed_forward", build=lambda c: _Stacked(c, gather), forward=lambda m, x: m(x),
        router=lambda m, x: m.weights(x), declares={"norm_topk_prob": True, "structure": "other"},
    )  # fmt: skip


class _Sorted(nn.Module):
    """Two of four experts for each token, whose copies are sorted by expert and put back."""

    def __init__(self, c: DrawnConfig, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.back, self.router = back, nn.Linear(c.d_model, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        best, which = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return best / best.sum(-1, keepdim=True), which

    def weights(self, x: Tensor) -> Tensor:
        best, which = self.route(x)
        return torch.zeros(*x.shape[:-1], 4).to(best).scatter(-1, which, best)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        best, which = self.route(tokens)
        order = which.flatten().argsort(stable=True)
        many = torch.bincount(which.flatten(), minlength=4).tolist()
        parts = tokens[order // 2].split(many)
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        y: Tensor = (made[self.back(order)].unflatten(0, (-1, 2)) * best[..., None]).sum(1)
        return y.view_as(x)


@fault(
    "RT-order-for-inverse",
    "What experts gave is put back in the order of the sorting, not in its inverse",
    killed_by=("router.weights",),
    cause="is not put back in the inverse of the order",
)
def put_back_in_the_order() -> Subject:
    back: Callable[[Tensor], Tensor] = put(lambda order: order, instead_of=lambda order: order.argsort())
    return Subject(
        kind="feed_forward", build=lambda c: _Sorted(c, back), forward=lambda m, x: m(x),
        router=lambda m, x: m.weights(x), declares={"norm_topk_prob": True, "structure": "other"},
    )  # fmt: skip


class _Rounded(nn.Module):
    """A feed-forward network whose weights are rounded to 8 bits while it is trained."""

    def __init__(self, c: DrawnConfig, through: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.through = through
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def of(self, weight: Tensor) -> Tensor:
        step = weight.abs().amax(1, keepdim=True) / 127
        return self.through(weight, (weight / step).round() * step)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.linear(x, self.of(self.up.weight), self.up.bias))
        return F.linear(y, self.of(self.down.weight), self.down.bias)


@fault(
    "TR-rounded",
    "Weights are rounded in the forward, and the rounding lets no gradient through",
    killed_by=("training.parameters-move",),
    cause="the rounding lets no gradient through",
)
def rounded_without_a_gradient() -> Subject:
    through: Callable[[Tensor, Tensor], Tensor] = put(
        lambda weight, rounded: rounded, instead_of=lambda weight, rounded: weight + (rounded - weight).detach()
    )
    return Subject(
        kind="feed_forward", build=lambda c: _Rounded(c, through), forward=lambda m, x: m(x),
        declares={"activation": "relu", "quantised": True},
    )  # fmt: skip


class _Fused(Function):
    """Cross entropy whose gradient is made in the forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, counted: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        valid = labels != -100
        target = labels.masked_fill(~valid, 0)[..., None]
        log_p, many = logits.log_softmax(-1), valid.sum().clamp(min=1)
        ones = torch.zeros_like(logits).scatter(-1, target, 1.0)
        ctx.save_for_backward(counted(log_p.exp() - ones, valid) / many)
        made: Tensor = -(log_p.gather(-1, target)[..., 0] * valid).sum() / many
        return made

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * up, None, None


@fault(
    "LS-ignored-slope",
    "Ignored labels count nothing in a loss and have a gradient in its own backward",
    killed_by=("loss.definition",),
    cause="gives a gradient to positions that are not counted",
)
def ignored_labels_have_a_gradient() -> Subject:
    counted: Callable[[Tensor, Tensor], Tensor] = put(
        lambda slope, valid: slope, instead_of=lambda slope, valid: slope * valid[..., None]
    )
    return Subject(
        kind="loss", forward=lambda m, logits, labels: _Fused.apply(logits, labels, counted),
        declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True},
    )  # fmt: skip


class _Biased(nn.Module):
    """Three maps in one tensor, with their biases in another."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.maps_weight = nn.Parameter(torch.randn(3, c.d_model, c.d_model))
        self.maps_bias = nn.Parameter(torch.zeros(3, 1, c.d_model))
        self.head = nn.Linear(c.d_model, c.vocab_size)


def _groups(module: nn.Module, decays: Callable[[str, nn.Parameter], bool]) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    return [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]


@fault(
    "PG-stacked-biases",
    "What decays is told by the number of axes, and the biases of stacked maps have three",
    killed_by=("schedule.decay-groups",),
    cause="biases of several maps in one tensor",
)
def stacked_biases_decay() -> Subject:
    decays: Callable[[str, nn.Parameter], bool] = put(
        lambda name, p: p.ndim > 1, instead_of=lambda name, p: p.ndim > 1 and not name.endswith("bias")
    )
    return Subject(kind="parameter_groups", build=_Biased, forward=lambda m: _groups(m, decays))


@fault(
    "PG-before-the-head",
    "The groups are made before the head is replaced by another",
    killed_by=("schedule.decay-groups",),
    cause="before a part of the model was replaced",
)
def groups_before_the_head() -> Subject:
    first: bool = put(True, instead_of=False)

    def forward(m: Any) -> list[dict[str, Any]]:
        def decays(name: str, p: nn.Parameter) -> bool:
            return not name.endswith("bias")

        early = _groups(m, decays)
        m.head = nn.Linear(m.head.in_features, 3)
        return early if first else _groups(m, decays)

    return Subject(kind="parameter_groups", build=_Biased, forward=forward)
