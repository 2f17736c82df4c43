"""Self-attention does not need O(n^2) memory: port of the JAX listing of Rabe and Staats to torch.

`lax.dynamic_slice` clamps its start so that the slice always has the full chunk size; `dynamic_slice` below does the same.
"""
import math

import torch
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "dynamic_slice clamps the start of the last key chunk, so where the chunk size does not divide the number of keys the last "
    "chunk overlaps the one before it and the overlapping keys are counted twice in numerator and denominator."
)
PLACE = "_query_chunk_attention.chunk_scanner: keys before chunk_idx are not masked out of the clamped slice"


def dynamic_slice(x, start, size, axis):
    start = max(0, min(start, x.shape[axis] - size))
    return x.narrow(axis, start, size), start


def _query_chunk_attention(query, key, value, mask, q_start, causal, key_chunk_size, mask_overlap):
    num_kv = key.shape[-2]
    key_chunk_size = min(key_chunk_size, num_kv)
    query = query / math.sqrt(query.shape[-1])
    q_pos = torch.arange(q_start, q_start + query.shape[-2], device=query.device)

    def summarize_chunk(key_chunk, value_chunk, bias):
        attn_weights = query @ key_chunk.transpose(-1, -2) + bias
        max_score = attn_weights.amax(-1, keepdim=True).detach()
        max_score = torch.where(max_score == -math.inf, torch.zeros_like(max_score), max_score)
        exp_weights = torch.exp(attn_weights - max_score)
        return exp_weights @ value_chunk, exp_weights.sum(-1, keepdim=True), max_score

    def chunk_scanner(chunk_idx):
        key_chunk, at = dynamic_slice(key, chunk_idx, key_chunk_size, -2)
        value_chunk, _ = dynamic_slice(value, chunk_idx, key_chunk_size, -2)
        k_pos = torch.arange(at, at + key_chunk_size, device=query.device)
        blocked = torch.zeros(query.shape[-2], key_chunk_size, dtype=torch.bool, device=query.device)
        if mask_overlap:
            blocked = blocked | (k_pos < chunk_idx)
        if causal:
            blocked = blocked | (k_pos[None, :] > q_pos[:, None])
        if mask is not None:
            rows = mask.narrow(-2, q_start, query.shape[-2])
            blocked = blocked | ~rows.narrow(-1, at, key_chunk_size)
        bias = torch.zeros(blocked.shape, dtype=query.dtype, device=query.device).masked_fill(blocked, -math.inf)
        return summarize_chunk(key_chunk, value_chunk, bias)

    chunks = [chunk_scanner(i) for i in range(0, num_kv, key_chunk_size)]
    chunk_values, chunk_weights, chunk_max = (torch.stack(parts) for parts in zip(*chunks))
    seen = chunk_weights.detach() > 0
    global_max = torch.where(seen, chunk_max, torch.full_like(chunk_max, -math.inf)).amax(0, keepdim=True)
    global_max = torch.where(global_max == -math.inf, torch.zeros_like(global_max), global_max)
    diffs = torch.where(seen, torch.exp(torch.where(seen, chunk_max - global_max, torch.zeros_like(chunk_max))), 0.0)
    all_values = (chunk_values * diffs).sum(0)
    all_weights = (chunk_weights * diffs).sum(0)
    return all_values / torch.where(all_weights == 0, torch.ones_like(all_weights), all_weights)


def attention(query, key, value, mask=None, causal=False, query_chunk_size=128, key_chunk_size=48, mask_overlap=True):
    """[B,H,T,K], [B,G,S,K], [B,G,S,E] -> [B,H,T,E]; mask [T,S] or [B,T,S], True: visible."""
    dtype = query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    rep = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(rep, 1), value.repeat_interleave(rep, 1)
    if mask is not None:
        mask = mask.bool()
        mask = mask[:, None] if mask.dim() == 3 else mask[None, None]
    out = [
        _query_chunk_attention(
            query[:, :, i : i + query_chunk_size], key, value, mask, i, causal, key_chunk_size, mask_overlap
        )
        for i in range(0, query.shape[2], query_chunk_size)
    ]
    return torch.cat(out, 2).to(dtype)


FACTS = {
    "attention_scale": "1/sqrt(d_head)",
    "grouped_queries": True,
    "empty_row": "zeros",
    "causal_alignment": "top-left",
    "half_precision": True,
    "memory": "linear",
}
right = Subject(
    kind="attention",
    name="rabe-staats",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares=FACTS,
)
wrong = Subject(
    kind="attention",
    name="rabe-staats-overlap",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: attention(
        q, k, v, attention_mask, causal, mask_overlap=False
    ),
    mask_forms=("pairwise",),
    declares=FACTS,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)

    def error(sub, t, s, causal, masked):
        q, k, v = torch.randn(2, 4, t, 8), torch.randn(2, 4, s, 8), torch.randn(2, 4, s, 6)
        mask = torch.rand(2, t, s) > 0.5 if masked else None
        ok = torch.ones(t, s, dtype=torch.bool)
        ok = ok.tril() if causal else ok
        ok = ok if mask is None else ok & mask[:, None]
        w = (q.double() @ k.double().mT / 8**0.5).masked_fill(~ok, -math.inf).softmax(-1).nan_to_num(0.0)
        return (sub.forward(None, q, k, v, mask, causal).double() - w @ v.double()).abs().max().item()

    for causal in (False, True):
        for masked in (False, True):
            for t, s in [(3, 5), (17, 17), (48, 48), (20, 47), (96, 96), (150, 144), (9, 3)]:
                assert error(right, t, s, causal, masked) < 2e-5
                assert error(wrong, t, s, causal, masked) < 2e-5
            for t, s in [(100, 100), (64, 64), (49, 49), (200, 130)]:
                assert error(right, t, s, causal, masked) < 2e-5
                assert error(wrong, t, s, causal, masked) > 0.02, (t, s, causal)
    print("ok")
