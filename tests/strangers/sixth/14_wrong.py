"""Decoding attention: keys and values in pages, accumulators updated in place. For inference alone."""

import torch

from veriformer.properties import Subject

PAGE = 16


@torch.no_grad()
def paged_attention(q, k, v, allowed):
    B, H, T, D = q.shape
    n = H // k.shape[1]
    S, E = k.shape[2], v.shape[3]
    compute = torch.promote_types(q.dtype, torch.float32)

    best = torch.full((B, H, T, 1), float("-inf"), dtype=compute, device=q.device)
    total = torch.zeros((B, H, T, 1), dtype=q.dtype, device=q.device)
    acc = torch.zeros((B, H, T, E), dtype=q.dtype, device=q.device)
    qs = q.to(compute) * D**-0.5

    for page in range(0, S, PAGE):
        kp = k[:, :, page : page + PAGE].to(compute).repeat_interleave(n, dim=1)
        vp = v[:, :, page : page + PAGE].to(compute).repeat_interleave(n, dim=1)
        s = qs @ kp.transpose(-1, -2)
        if allowed is not None:
            s.masked_fill_(~allowed[..., page : page + PAGE], float("-inf"))
        new = torch.maximum(best, s.amax(-1, keepdim=True))
        base = new.masked_fill(new.isneginf(), 0.0)
        keep = (best - base).exp_()
        p = (s - base).exp_()
        total.mul_(keep).add_(p.sum(-1, keepdim=True))
        acc.mul_(keep).add_(p @ vp)
        best = new

    return (acc / total.masked_fill(total == 0, 1.0)).to(q.dtype)


def forward(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[2], k.shape[2]
    allowed = None
    if attention_mask is not None:  # [B, S]
        allowed = attention_mask[:, None, None, :]
    if causal:
        seen = torch.arange(S, device=q.device) <= torch.arange(S - T, S, device=q.device)[:, None]
        allowed = seen if allowed is None else allowed & seen
    return paged_attention(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="paged attention",
    forward=forward,
    mask_forms=("padding",),
    declares={
        "inference_only": True,
        "grouped_queries": True,
        "causal_alignment": "bottom-right",
        "empty_row": "zeros",
        "attention_scale": "1/sqrt(d_head)",
        "half_precision": True,
    },
)
