import torch

from veriformer.properties import Subject

BUCKET = 16


def chunked_attention(model, q, k, v, attention_mask=None, causal=False):
    """Memory-efficient attention, queries in buckets."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    S, scale = k.shape[-2], q.shape[-1] ** -0.5
    key_index = torch.arange(S, device=q.device)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(*attention_mask.shape[:-2], q.shape[-2], S)
    outputs = []
    for start in range(0, q.shape[-2], BUCKET):
        block = q[..., start:start + BUCKET, :]
        sim = torch.einsum("bhik,bhjk->bhij", block, k) * scale
        hidden = torch.zeros_like(sim, dtype=torch.bool)
        if causal:
            query_index = start + torch.arange(block.shape[-2], device=q.device)
            hidden = hidden | (key_index[None, :] > query_index[:, None])
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[..., start:start + BUCKET, :]
        sim = sim.masked_fill(hidden, torch.finfo(sim.dtype).min)
        outputs.append(torch.einsum("bhij,bhje->bhie", sim.softmax(-1), v))
    return torch.cat(outputs, dim=-2)


subject = Subject(
    kind="attention",
    name="attention by buckets of queries",
    forward=chunked_attention,
    mask_forms=("pairwise",),
    declares={"empty_row": "mean", "causal_alignment": "top-left", "grouped_queries": True},
)
