"""Causal linear attention (feature map elu + 1), chunk by chunk: quadratic inside a chunk, a running state between."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def chunked_linear_attention(q, k, v, chunk=8):
    """q, k [B,H,T,K] are positive features; out_t = sum_{s<=t} (q_t.k_s) v_s / sum_{s<=t} q_t.k_s"""
    B, H, T, K = k.shape
    state = v.new_zeros(B, H, K, v.shape[-1])
    norm = k.new_zeros(B, H, K, 1)
    outs = []
    for t in range(0, T, chunk):
        qc, kc, vc = q[:, :, t : t + chunk], k[:, :, t : t + chunk], v[:, :, t : t + chunk]
        local = torch.tril(qc @ kc.transpose(-1, -2))
        num = local @ vc + qc @ state
        den = local.sum(-1, keepdim=True) + qc @ norm
        outs.append(num / torch.where(den == 0, torch.ones_like(den), den))
        state = state + kc.transpose(-1, -2) @ vc
        norm = kc.sum(dim=2).unsqueeze(-1)
    return torch.cat(outs, dim=2)


class LinearSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, keep=None):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.to_qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if keep is not None:
            k = k.masked_fill(~keep[:, None, :, None], 0.0)
        out = chunked_linear_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(b, t, -1))


subject = Subject(
    kind="self_attention",
    name="LinearSelfAttention",
    build=lambda c: LinearSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "none",
        "memory": "linear",
        "init": "default",
        "padding_side": "both",
        "empty_row": "zeros",
        "residual": False,
    },
)
