"""Faults of layout: fused projections, folded heads, squeezed axes, masks and channels that land in the wrong place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.heads import attends
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import SelfAttention, attention, layer, masked, self_attention


class Fused(nn.Module):
    """Self-attention with one matrix for queries, keys and values, laid out as [Q | K | V]."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.width = config.num_heads, config.num_key_value_heads, config.d_head
        self.qkv = nn.Linear(config.d_model, (self.heads + 2 * self.groups) * self.width)
        self.o = nn.Linear(config.d_model, config.d_model)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [n * self.width for n in (self.heads, self.groups, self.groups)]
        q, k, v = (p.unflatten(-1, (-1, self.width)).transpose(1, 2) for p in self.qkv(x).split(sizes, dim=-1))
        return q, k, v

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.groups)
        return self.o(mixed.transpose(1, 2).flatten(2))


def fused(cls: type[Fused], **given: Any) -> Subject:
    def projections(model: Any) -> dict[str, Tensor]:
        sizes = [n * model.width for n in (model.heads, model.groups, model.groups)]
        weights = dict(zip("qkv", model.qkv.weight.split(sizes), strict=True))
        biases = dict(zip(("q_bias", "k_bias", "v_bias"), model.qkv.bias.split(sizes), strict=True))
        return weights | biases | {"o": model.o.weight, "o_bias": model.o.bias}

    subject = self_attention(cls, grouped_queries=True)
    return replace(subject, projections=projections, **given)


@fault(
    "HD07",
    "Fused QKV split by chunk(3) under GQA",
    killed_by=("attention.definition",),
    cause="other rows than its own",
)
def chunked() -> Subject:
    class Chunked(Fused):
        def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            every = self.qkv(x)
            third, few = every.shape[-1] // 3, self.groups * self.width
            q, k, v = every[..., : self.heads * self.width], every[..., third:], every[..., 2 * third :]
            q, k, v = (p.unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (q, k[..., :few], v[..., :few]))
            return q, k, v

    return fused(Chunked, domain={"num_heads": [4], "num_key_value_heads": [1], "d_model": [16]})


@fault(
    "HD08",
    "Fused QKV layout: per-head interleaved vs [Q|K|V]",
    killed_by=("attention.definition",),
    cause="other rows than its own",
)
def interleaved() -> Subject:
    class Interleaved(Fused):
        def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, self.width)).unbind(-2)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    return fused(Interleaved, domain={"num_heads": [3], "num_key_value_heads": [3]})


@fault(
    "HD10",
    "Wrong expansion when windows/multiplicity are mixed into the batch axis",
    killed_by=("padding.content-irrelevant", "padding.amount-irrelevant"),
    cause="padded positions",
)
def folded() -> Subject:
    class Folded(SelfAttention):
        """Heads are folded into the batch axis; the masks are tiled where they must be repeated one by one."""

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            q, k, v = (self.split(p(x)).flatten(0, 1) for p in (self.q, self.k, self.v))
            scores = q @ k.transpose(-2, -1) * self.width**-0.5
            if attention_mask is not None:
                allow = attention_mask.repeat(self.heads, 1)  # right: repeat_interleave(self.heads, 0)
                scores = scores.masked_fill(~allow[:, None, :], -torch.inf)
            mixed = scores.softmax(-1).nan_to_num(0.0) @ v
            return self.o(self.merge(mixed.unflatten(0, (-1, self.heads))))

    return self_attention(Folded)


@fault(
    "HD11",
    "squeeze() drops batch or time of size 1",
    killed_by=("batch.independence",),
    cause="in the forward of Gated",
)
def squeezed() -> Subject:
    class Gated(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab_size, config.d_model)
            self.gate, self.head = nn.Linear(config.d_model, 1), nn.Linear(config.d_model, config.num_classes)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            gate = self.gate(x).squeeze().sigmoid()  # right: squeeze(-1); [B, 1, 1] becomes [B]
            return self.head((gate.unsqueeze(-1) * x).sum(1))

    return Subject(kind="classifier", build=Gated, forward=lambda m, tokens: m(tokens), declares={"positions": "none"})


@fault(
    "BK02",
    "Value head-dim different from query head-dim",
    killed_by=("attention.definition",),
    cause="beyond the width of the keys",
)
def narrow_values() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        out = torch.zeros(*s.shape[:-1], v.shape[-1], dtype=v.dtype)
        out[..., :d] = (masked(s * d**-0.5, allow) @ v)[..., :d]  # the buffer was laid out for queries
        return out

    return attention(combine)


@fault(
    "CM20",
    "Block/group mask computed from wrong token metadata",
    killed_by=("attention.mask-semantics", "attention.masked-equals-removed"),
)
def by_blocks() -> Subject:
    def combine(s: Tensor, v: Tensor, allow: Tensor, d: int, h: int) -> Tensor:
        first = allow[..., ::2].repeat_interleave(2, dim=-1)[..., : allow.shape[-1]]  # a block's first key decides
        return masked(s * d**-0.5, first) @ v

    return attention(combine)


class _Cross(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)


@fault(
    "XA05",
    "Unpadding path applies the key mask to the query",
    killed_by=("padding.amount-irrelevant",),
    cause="padded on the right",
)
def unpadded() -> Subject:
    def forward(model: Any, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        blocked = None if memory_mask is None else ~memory_mask
        output = model.attention(x, memory, memory, key_padding_mask=blocked, need_weights=False)[0]
        if memory_mask is not None:
            more = max(0, x.shape[1] - memory.shape[1])
            kept = functional.pad(memory_mask, (0, more), value=True)[:, : x.shape[1]]
            output = output * kept[..., None]
        return output

    return Subject(kind="cross_attention", build=_Cross, forward=put(forward, instead_of=attends))


@fault(
    "XA08",
    "Cross-attention cache inherits the decoder's sliding window",
    killed_by=("cross_attention.memory-matters",),
    cause="of the memory changes no output",
)
def windowed_memory() -> Subject:
    def forward(model: Any, x: Tensor, memory: Tensor) -> Tensor:
        seen = memory[:, -4:]  # the window of the decoder
        return model.attention(x, seen, seen, need_weights=False)[0]

    return Subject(kind="cross_attention", build=_Cross, forward=put(forward, instead_of=attends))


@fault(
    "PM04",
    "finfo.min + finfo.min overflows to -inf",
    killed_by=("padding.left", "padding.content-irrelevant"),
    cause="padded",
)
def overflowing_masks() -> Subject:
    class Sums(SelfAttention):
        """Two layers of attention under a sum of three masks, each 0 or the lowest number."""

        def attend(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + self.o(self.merge((self.scores(x) + mask).softmax(-1) @ self.split(self.v(x))))

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            lowest = torch.finfo(x.dtype).min
            mask = torch.zeros(1, 1, x.shape[1], x.shape[1], dtype=x.dtype)
            mask = mask + torch.ones_like(mask).triu(1) * lowest
            if attention_mask is not None:
                padded = (~attention_mask).to(x.dtype) * lowest
                mask = mask + padded[:, None, None, :] + padded[:, None, :, None]
            return self.attend(self.attend(x, mask), mask)

    return layer(Sums, causal=True, positions="none", padding_side="both")


class PostNorm(SelfAttention):
    """A post-LN layer."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__(config)
        self.norm1, self.norm2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)

    def change(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        stream = self.norm1(x + super().forward(x, attention_mask))
        return self.norm2(self.change(stream) + stream)


@fault(
    "NM07",
    "Post-LN residual taken before normalising",
    killed_by=("residual.identity",),
    cause="the stream does not pass",
)
def residual_before_the_norm() -> Subject:
    class Wrong(PostNorm):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            summed = x + SelfAttention.forward(self, x, attention_mask)
            return self.norm2(self.change(self.norm1(summed)) + summed)

    return layer(Wrong, causal=False, positions="none", norm="layer", norm_placement="post", residual=True)


@fault(
    "grouped-folded-mask",
    "Heads of a group are folded into the time axis head by head, the rows of the mask query by query",
    killed_by=("attention.tiles",),
    cause="a query gets the mask of another",
)
def folded_mask() -> Subject:
    axis = put(2, instead_of=1)

    def forward(m: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, causal: bool = False) -> Tensor:
        (_, heads, length, width), groups, keys = q.shape, k.shape[1], k.shape[2]
        each = heads // groups
        allow = torch.ones(len(q), 1, length, keys, dtype=torch.bool)
        allow = allow.tril(keys - length) if causal else allow
        if attention_mask is not None:
            allow = allow & (attention_mask if attention_mask.ndim == 4 else attention_mask[:, None])
        rows = allow[:, 0].unsqueeze(axis).repeat_interleave(each, axis).flatten(1, 2)[:, None]  # [B, 1, R T, S]
        scores = q.unflatten(1, (groups, each)).flatten(2, 3) @ k.mT * width**-0.5
        weights = scores.masked_fill(~rows, torch.finfo(q.dtype).min).softmax(-1) * rows
        return (weights @ v).unflatten(2, (each, length)).flatten(1, 2)

    return Subject(
        kind="attention",
        forward=forward,
        mask_forms=("pairwise",),
        declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
    )
