"""Memory-efficient attention after Rabe and Staats, ported from their JAX code: summaries of chunks of keys, then one merge."""

import torch

from veriformer.properties import Subject

KEY_CHUNK = 16


def dynamic_slice(x, start, size, dim):
    """As lax.dynamic_slice_in_dim."""
    start = max(0, min(start, x.shape[dim] - size))
    return x.narrow(dim, start, size)


def summarize_chunk(query, key, value, allowed):
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key).masked_fill(~allowed, float("-inf"))
    chunk_max = scores.detach().amax(dim=-1, keepdim=True)
    exp_scores = (scores - chunk_max.masked_fill(chunk_max.isinf(), 0.0)).exp()
    exp_values = torch.einsum("bhqk,bhkv->bhqv", exp_scores, value)
    return exp_values, exp_scores.sum(dim=-1, keepdim=True), chunk_max


def attention(query, key, value, allowed):
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    q = q * q.shape[-1] ** -0.5
    num_kv = k.shape[-2]
    values, weights, maxes = [], [], []
    for chunk_idx in range(0, num_kv, KEY_CHUNK):
        size = min(KEY_CHUNK, num_kv - chunk_idx)
        chunk = summarize_chunk(
            q,
            dynamic_slice(k, chunk_idx, size, -2),
            dynamic_slice(v, chunk_idx, size, -2),
            dynamic_slice(allowed, chunk_idx, size, -1),
        )
        for store, part in zip((values, weights, maxes), chunk):
            store.append(part)
    chunk_max = torch.stack(maxes)
    global_max = chunk_max.amax(dim=0)
    rescale = (chunk_max - global_max.masked_fill(global_max.isinf(), 0.0)).exp()
    all_values = (torch.stack(values) * rescale).sum(dim=0)
    all_weights = (torch.stack(weights) * rescale).sum(dim=0)
    return (all_values / all_weights.masked_fill(all_weights == 0, 1.0)).to(query.dtype)


def forward(model, q, k, v, attention_mask=None, causal=False):
    shape = (*q.shape[:-1], k.shape[-2])
    allowed = torch.ones(shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return attention(q, k, v, allowed.expand(shape))


subject = Subject(
    kind="attention",
    name="memory-efficient attention",
    forward=forward,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left"},
)
