"""Right attention that looks wrong: other scales, sinks, renormalised masks, soft caps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.parts import SelfAttention, attention, masked, self_attention
from veriformer.tests.traps import trap


@trap("T01", "No 1/sqrt(d_k): T5 folds it into the initialisation", "facebookresearch/xformers#522")
def unscaled() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s, allow) @ v, declares={"attention_scale": "1"})


@trap("T02", "1/d instead of 1/sqrt(d): muP", "openai/improved-diffusion#54")
def mup() -> Subject:
    return attention(lambda s, v, allow, d, h: masked(s / d, allow) @ v, declares={"attention_scale": "1/d_head"})


@trap("T02-quarter", "d^-1/4 on q and on k", "charliezchen/scaling-matrix-preconditioning#2")
def quarter() -> Subject:
    def forward(model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        root = q.shape[-1] ** -0.25
        scores = (q * root) @ (k * root).transpose(-2, -1)
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool) if attention_mask is None else attention_mask
        return masked(scores, allow) @ v

    return Subject(kind="attention", forward=forward)


@trap("T05", "The mask is applied after the softmax, then renormalised", "abisee/pointer-generator#88")
def renormalised() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        scores = s * d**-0.5
        shown = (scores - scores.masked_fill(~allow, -torch.inf).amax(-1, keepdim=True).nan_to_num(0, 0, 0)).clamp(
            max=60
        )
        weights = shown.exp() * allow
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v

    return attention(combine)


class _Sink(SelfAttention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        zeros = torch.zeros_like(scores[..., :1])
        return torch.cat([scores, zeros], dim=-1).softmax(dim=-1)[..., :-1]


@trap("T06", "Softmax plus one: rows of weights sum to less than one", "fla-org/flash-linear-attention#831")
def sink() -> Subject:
    return self_attention(_Sink, weights=True, sink=True)


@trap("T07", "A sink as sigmoid(lse - sink) times the output", "pytorch/torchtitan#2211")
def sigmoid_sink() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        scores = (s * d**-0.5).masked_fill(~allow, -torch.inf)
        return masked(s * d**-0.5, allow) @ v * torch.sigmoid(scores.logsumexp(-1, keepdim=True))

    return attention(combine, declares={"sink": True})


@trap("T39", "Scores are soft-capped", "vllm-project/vllm#7022")
def soft_capped() -> Subject:
    return attention(
        lambda s, v, allow, d, h: masked(5.0 * torch.tanh(s * d**-0.5 / 5.0), allow) @ v, declares={"soft_cap": 5.0}
    )


@trap("T20-qk-norm", "Queries and keys are normalised", "architecture knowledge")
def normalised_queries() -> Subject:
    class QueryKeyNorm(SelfAttention):
        def scores(self, x: Tensor) -> Tensor:
            q, k = (torch.nn.functional.normalize(self.split(p(x)), dim=-1) for p in (self.q, self.k))
            return 4.0 * q @ k.transpose(-2, -1)

    return self_attention(QueryKeyNorm, weights=True, query_key_norm=True)


@trap("plain-undeclared", "A right module that declares nothing at all")
def undeclared() -> Subject:
    return Subject(
        kind="self_attention", build=SelfAttention, forward=lambda m, x, attention_mask=None: m(x, attention_mask)
    )


@trap("T29", "The softmax is computed in float32 whatever the dtype of the model", "pytorch/pytorch#179578")
def upcast_softmax() -> Subject:
    class Upcast(SelfAttention):
        def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
            return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)

    return Subject(
        kind="layer",
        build=Upcast,
        forward=lambda m, x, attention_mask=None: x + m(x, attention_mask),
        declares={"causal": False, "positions": "none"},
    )


@trap(
    "attention-sinks-defined", "Sinks beside a window, of which projections and weights are given", "Xiao et al. 2024"
)
def sinks_that_are_defined() -> Subject:
    class Streaming(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.heads = c.num_heads
            self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

        def weights(self, x: Tensor) -> Tensor:
            at = torch.arange(x.shape[1], device=x.device)
            seen = (at <= at[:, None]) & ((at > at[:, None] - 3) | (at < 2))
            q, k = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k))
            scores = q @ k.mT * q.shape[-1] ** -0.5
            return scores.masked_fill(~seen, -torch.inf).softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            v = self.v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            y: Tensor = self.o((self.weights(x) @ v).transpose(1, 2).flatten(2))
            return y

        def parts(self) -> dict[str, Tensor]:
            maps = {"q": self.q, "k": self.k, "v": self.v, "o": self.o}
            return {n: m.weight for n, m in maps.items()} | {f"{n}_bias": m.bias for n, m in maps.items()}

    return Subject(
        kind="self_attention", build=Streaming, forward=lambda m, x: m(x), weights=lambda m, x: m.weights(x),
        projections=lambda m: m.parts(),
        declares={"causal": True, "window": 3, "sink_tokens": 2, "positions": "none"},
    )  # fmt: skip
