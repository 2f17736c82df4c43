"""Split-KV attention ("flash decoding"): the keys are cut into pieces, each piece is attended to by itself, and a
second, tiny kernel puts the partial results together. Everything is a pure function of arrays; the model is empty."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WHAT = "The reduction over key splits weighs each split by its sum of exponentials alone, not by that times exp(its own maximum)."
CAUSE = (
    "Every split's denominator is counted from that split's own maximum score; merging them without the factor "
    "exp(m_split - m_global) gives splits with low scores far too much weight. The softmax inside a split is right, "
    "the combine step is not."
)
PIECES = 2


class Partial(NamedTuple):
    top: Tensor  # [B, H, T, 1], -inf where the piece shows nothing
    total: Tensor  # [B, H, T, 1], counted from `top`
    mixed: Tensor  # [B, H, T, E], not yet divided


def finite(top: Tensor) -> Tensor:
    return torch.where(torch.isinf(top), torch.zeros_like(top), top)


def attend_piece(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Partial:
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = torch.where(allowed, scores, torch.full_like(scores, -math.inf))
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - finite(top))
    return Partial(top, weights.sum(-1, keepdim=True), torch.einsum("bhts,bhse->bhte", weights, v))


def combine(parts: list[Partial]) -> Tensor:
    """Return the attention over all pieces; zeros where nothing is shown at all."""
    top = finite(torch.stack([part.top for part in parts]).amax(0))
    shares = [torch.exp(part.top - top) for part in parts]
    total = sum(share * part.total for share, part in zip(shares, parts))
    mixed = sum(share * part.mixed for share, part in zip(shares, parts))
    return mixed / torch.where(total == 0, torch.ones_like(total), total)


def combine_by_totals(parts: list[Partial]) -> Tensor:
    """Return the attention over all pieces; zeros where nothing is shown at all."""
    total = sum(part.total for part in parts)
    mixed = sum(part.mixed for part in parts)
    return mixed / torch.where(total == 0, torch.ones_like(total), total)


def split_kv(q, k, v, attention_mask, causal, reduce) -> Tensor:
    length, keys = q.shape[-2], k.shape[-2]
    allowed = torch.ones(length, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(keys - length)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    kept = torch.promote_types(q.dtype, torch.float32)
    pieces = min(PIECES, keys)
    parts = [
        attend_piece(q.to(kept), key.to(kept), value.to(kept), shown)
        for key, value, shown in zip(k.chunk(pieces, -2), v.chunk(pieces, -2), allowed.chunk(pieces, -1))
    ]
    return reduce(parts).to(q.dtype)


def subject(name: str, reduce) -> Subject:
    return Subject(
        kind="attention",
        name=name,
        build=lambda c: nn.Identity(),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: split_kv(q, k, v, attention_mask, causal, reduce),
        mask_forms=("pairwise",),
        declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
    )


right = subject("split-KV attention", combine)
wrong = subject("split-KV attention (b)", combine_by_totals)
