"""Faults of what is compared or looked up: steps for tokens, first rows for last, a cap behind a mask, lost counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

_STEP, _LONGEST, _LANE, _CAP, _DECAY = 3, 64, 4, 4.0, 0.1
Places = Callable[[Tensor], Tensor]


class _Steps(nn.Module):
    """A causal layer whose mask compares places of tokens, as `places` gives them."""

    def __init__(self, c: DrawnConfig, places: Places) -> None:
        super().__init__()
        self.heads, self.places = c.num_heads, places
        self.norm, self.qkv = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, 3 * c.d_model)
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        at = self.places(torch.arange(x.shape[1], device=x.device))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at)
        return x + self.out(seen.transpose(1, 2).flatten(2))


@fault(
    "CM-steps",
    "The causal mask compares steps of three tokens, not tokens: those of one step see one another both ways",
    killed_by=("causality.no-future-gradient",),
    cause="the mask compares blocks, or steps of 3 tokens",
)
def steps_are_compared() -> Subject:
    places: Places = put(lambda at: at // _STEP, instead_of=lambda at: at)
    return Subject(
        kind="layer", build=lambda c: _Steps(c, places), forward=lambda m, x: m(x),
        declares={"causal": True, "positions": "none", "norm_placement": "pre", "structure": "other"},
    )  # fmt: skip


class _Relative(nn.Module):
    """Attention with a vector for each distance, those of a length cut out of one table."""

    def __init__(self, c: DrawnConfig, first: Callable[[int], int]) -> None:
        super().__init__()
        self.heads, self.first = c.num_heads, first
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.table = nn.Parameter(torch.randn(2 * _LONGEST - 1, c.d_model // c.num_heads))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        at = torch.arange(length, device=x.device)
        begin = self.first(length)
        rows = self.table[begin : begin + 2 * length - 1][at - at[:, None] + length - 1]
        scores = (q @ k.mT + torch.einsum("bhtk,tsk->bhts", q, rows)) * q.shape[-1] ** -0.5
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@fault(
    "RP-first-rows",
    "Of a table of distances the first rows are taken, not those around 0: which is which depends on the length",
    killed_by=("attention.masked-equals-removed",),
    cause="rows are taken from the wrong end of their table",
)
def first_rows_for_the_middle() -> Subject:
    first: Callable[[int], int] = put(lambda length: 0, instead_of=lambda length: _LONGEST - length)
    return Subject(
        kind="self_attention", build=lambda c: _Relative(c, first),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "relative", "max_len": _LONGEST, "beyond_max_len": "error"},
    )  # fmt: skip


@fault(
    "AT-cap-behind-mask",
    "The soft cap comes behind the mask: hidden keys have a score of minus the cap",
    killed_by=("attention.mask-semantics",),
    cause="the soft cap comes behind the mask",
)
def capped_behind_the_mask() -> Subject:
    def capped(scores: Tensor) -> Tensor:
        return _CAP * (scores / _CAP).tanh()

    def after(scores: Tensor, hidden: Tensor) -> Tensor:
        return capped(scores.masked_fill(hidden, -torch.inf))

    def before(scores: Tensor, hidden: Tensor) -> Tensor:
        return capped(scores).masked_fill(hidden, -torch.inf)

    made = put(after, instead_of=before)

    def attend(model: None, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        hidden = torch.zeros_like(scores, dtype=torch.bool) if attention_mask is None else ~attention_mask
        scores = made(scores, hidden)
        return scores.softmax(-1).nan_to_num(0.0) @ v

    return Subject(
        kind="attention", forward=attend, mask_forms=("pairwise",), declares={"soft_cap": _CAP, "empty_row": "zeros"}
    )


@fault(
    "NO-count-of-lanes",
    "Squares of lanes are joined with how far their means lie apart, weighed without the count of those before",
    killed_by=("norm.definition",),
    cause="weighed by m / (n + m), not by n m / (n + m)",
)
def count_of_the_first_lane_is_missing() -> Subject:
    weight: Callable[[int, int], float] = put(lambda n, m: m / (n + m), instead_of=lambda n, m: n * m / (n + m))

    class Lanes(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            first, *others = x.split(_LANE, -1)
            count, mean = first.shape[-1], first.mean(-1, keepdim=True)
            squares = (first - mean).square().sum(-1, keepdim=True)
            for lane in others:
                more, other = lane.shape[-1], lane.mean(-1, keepdim=True)
                apart = other - mean
                squares = squares + (lane - other).square().sum(-1, keepdim=True)
                squares = squares + apart.square() * weight(count, more)
                mean, count = mean + apart * (more / (count + more)), count + more
            return (x - mean) * (squares / count + 1e-5).rsqrt() * self.gain + self.shift

    return Subject(kind="norm", build=lambda c: Lanes(c.d_model), forward=lambda m, x: m(x), declares={"norm": "layer"})


class _Fused(nn.Module):
    """A block that holds a matrix itself, beside modules."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.d_model)
        self.qkv_weight = nn.Parameter(torch.randn(3 * c.d_model, c.d_model) * c.d_model**-0.5)
        self.qkv_bias = nn.Parameter(torch.zeros(3 * c.d_model))


@fault(
    "OP-held-beside",
    "What a module holds itself is listed only where it holds no other module: its matrix does not decay",
    killed_by=("schedule.decay-groups",),
    cause="they are parameters of a module that holds others too",
)
def held_beside_modules() -> Subject:
    is_listed: Callable[[list[str]], bool] = put(lambda found: not found, instead_of=lambda found: True)

    def names(module: nn.Module) -> list[str]:
        found = [
            f"{name}.{inner}"
            for name, child in module.named_children()
            if not isinstance(child, nn.LayerNorm)
            for inner in names(child)
        ]
        return found + (list(module._parameters) if is_listed(found) else [])

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decays = {name for name in names(model) if not name.endswith("bias")}
        sides: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in model.named_parameters():
            sides[name in decays].append(parameter)
        return [{"params": sides[1], "weight_decay": _DECAY}, {"params": sides[0], "weight_decay": 0.0}]

    return Subject(
        kind="parameter_groups", build=lambda c: nn.ModuleList(_Fused(c) for _ in range(c.num_layers)), forward=groups
    )
