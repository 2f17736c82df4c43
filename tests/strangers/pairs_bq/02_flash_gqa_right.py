import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

BLOCK_N = 16


class FlashGQA(Function):
    """Blocks of keys, online softmax; the backward makes the weights again from the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, allowed, scale):
        B, H, T, _ = q.shape
        G, S, E = v.shape[1:]
        group = H // G
        out = q.new_zeros(B, H, T, E)
        lse = q.new_full((B, H, T, 1), torch.inf)
        for h in range(H):
            m = q.new_full((B, T, 1), -torch.inf)
            l = q.new_zeros(B, T, 1)
            acc = q.new_zeros(B, T, E)
            for n in range(0, S, BLOCK_N):
                cols = slice(n, n + BLOCK_N)
                s = (q[:, h] @ k[:, h // group, cols].mT) * scale
                s = s.masked_fill(~allowed[:, h, :, cols], -torch.inf)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
                p = (s - safe).exp()
                alpha = (m - safe).exp()
                l = l * alpha + p.sum(-1, keepdim=True)
                acc = acc * alpha + p @ v[:, h // group, cols]
                m = m_new
            seen = l > 0
            out[:, h] = acc / torch.where(seen, l, torch.ones_like(l))
            lse[:, h] = torch.where(seen, m + l.log(), torch.full_like(l, torch.inf))
        ctx.save_for_backward(q, k, v, allowed, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, allowed, out, lse = ctx.saved_tensors
        H, G, S = q.shape[1], k.shape[1], k.shape[2]
        group = H // G
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (do * out).sum(-1, keepdim=True)
        for h in range(H):
            g = h // group
            for n in range(0, S, BLOCK_N):
                cols = slice(n, n + BLOCK_N)
                s = (q[:, h] @ k[:, g, cols].mT) * ctx.scale
                s = s.masked_fill(~allowed[:, h, :, cols], -torch.inf)
                p = (s - lse[:, h]).exp()
                ds = p * (do[:, h] @ v[:, g, cols].mT - delta[:, h]) * ctx.scale
                dv[:, g, cols].add_(p.mT @ do[:, h])
                dq[:, h].add_(ds @ k[:, g, cols])
                dk[:, g, cols].add_(ds.mT @ q[:, h])
        return dq, dk, dv, None, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        if attention_mask.dim() == 3:
            attention_mask = attention_mask[:, None]
        allowed = allowed & attention_mask
    wide = torch.promote_types(q.dtype, torch.float32)
    out = FlashGQA.apply(q.to(wide), k.to(wide), v.to(wide), allowed.expand(B, H, T, S), 1.0 / math.sqrt(K))
    return out.to(q.dtype)


subject = Subject(
    kind="attention",
    name="flash with grouped queries",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
