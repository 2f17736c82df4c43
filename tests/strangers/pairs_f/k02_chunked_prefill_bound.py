"""Blockwise causal attention in a functional style, for training (T == S) and for chunked prefill (T < S)."""
from __future__ import annotations

import math

import torch
from torch import Tensor
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The number of key blocks a causal query block visits is computed from the query's row number without the S - T keys that "
    "precede it, so in chunked prefill (T < S) whole blocks of visible keys are skipped once S exceeds one block."
)
PLACE = "visible_blocks: `last_key = row_end` instead of `row_end + past`"

TILE = 64


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def visible_blocks(row_end: int, past: int, keys: int, causal: bool, count_past: bool) -> int:
    """How many key tiles the query rows [.., row_end) have to walk."""
    if not causal:
        return cdiv(keys, TILE)
    last_key = row_end + past if count_past else row_end
    return cdiv(max(0, min(last_key, keys)), TILE)


def online_step(state: tuple[Tensor, Tensor, Tensor], scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top, total, acc = state
    new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
    base = new_top.masked_fill(new_top == -math.inf, 0.0)
    p = (scores - base).exp()
    shrink = (top - base).exp()
    return new_top, total * shrink + p.sum(-1, keepdim=True), acc * shrink + p @ values


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, count_past: bool) -> Tensor:
    compute = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype
    q, k, v = (x.to(compute) for x in (q, k, v))
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    q = q.reshape(B, G, H // G, T, K) * K**-0.5
    k, v = k[:, :, None], v[:, :, None]
    if mask is not None:
        mask = mask.bool()
        mask = mask[:, None, None] if mask.dim() == 3 else mask  # [B,1,1,T,S] or [T,S]
    past = S - T
    rows = torch.arange(T, device=q.device)[:, None] + past
    cols = torch.arange(S, device=q.device)[None]
    out = []
    for i in range(0, T, TILE):
        qi = q[..., i : i + TILE, :]
        n = qi.shape[-2]
        state = (
            qi.new_full((*qi.shape[:-1], 1), -math.inf),
            qi.new_zeros((*qi.shape[:-1], 1)),
            qi.new_zeros((*qi.shape[:-1], v.shape[-1])),
        )
        for block in range(visible_blocks(i + n, past, S, causal, count_past)):
            at = slice(block * TILE, min((block + 1) * TILE, S))
            scores = qi @ k[..., at, :].transpose(-1, -2)
            if causal:
                scores = scores.masked_fill(cols[:, at] > rows[i : i + n], -math.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask[..., i : i + n, at], -math.inf)
            state = online_step(state, scores, v[..., at, :])
        _, total, acc = state
        out.append(acc / total.masked_fill(total == 0, 1.0))
    return torch.cat(out, -2).reshape(B, H, T, -1).to(out_dtype)


class BlockwiseAttention(torch.nn.Module):
    def __init__(self, count_past: bool):
        super().__init__()
        self.count_past = count_past

    def forward(self, q, k, v, attention_mask=None, causal=False):
        return blockwise_attention(q, k, v, attention_mask, causal, self.count_past)


FACTS = {
    "attention_scale": "1/sqrt(d_head)",
    "grouped_queries": True,
    "empty_row": "zeros",
    "causal_alignment": "bottom-right",
    "half_precision": True,
    "memory": "linear",
}


def build_right(c: DrawnConfig):
    return BlockwiseAttention(count_past=True)


def build_wrong(c: DrawnConfig):
    return BlockwiseAttention(count_past=False)


right = Subject(kind="attention", build=build_right, mask_forms=("pairwise",), declares=FACTS, name="chunked-prefill")
wrong = Subject(kind="attention", build=build_wrong, mask_forms=("pairwise",), declares=FACTS, name="chunked-prefill-bound")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)

    def error(subject, t, s, causal=True, masked=False):
        q, k, v = torch.randn(2, 4, t, 8), torch.randn(2, 2, s, 8), torch.randn(2, 2, s, 12)
        mask = (torch.rand(2, t, s) > 0.3) if masked else None
        ok = torch.ones(t, s, dtype=torch.bool).tril(s - t) if causal else torch.ones(t, s, dtype=torch.bool)
        ok = ok[None, None] if mask is None else ok & mask[:, None]
        kk, vv = k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
        w = (q.double() @ kk.transpose(-1, -2) / 8**0.5).masked_fill(~ok, -math.inf).softmax(-1).nan_to_num(0.0)
        got = subject.build(DrawnConfig())(q, k, v, attention_mask=mask, causal=causal)
        return (got.double() - w @ vv).abs().max().item()

    for masked in (False, True):
        for t, s in [(4, 4), (3, 9), (9, 3), (1, 64), (64, 64), (200, 200), (130, 70), (60, 100)]:
            assert error(right, t, s, True, masked) < 2e-5 and error(right, t, s, False, masked) < 2e-5
        for t, s in [(4, 4), (3, 9), (9, 3), (1, 64), (64, 64), (200, 200), (130, 70)]:
            assert error(wrong, t, s, True, masked) < 2e-5 and error(wrong, t, s, False, masked) < 2e-5
        for t, s in [(1, 65), (16, 100), (60, 100), (100, 300)]:
            assert error(right, t, s, True, masked) < 2e-5
            assert error(wrong, t, s, True, masked) > 0.05, (t, s)
    print("ok")
