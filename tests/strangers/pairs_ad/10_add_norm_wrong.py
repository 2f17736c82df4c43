WHAT = "the fused add-and-norm hands back the old residual rather than the sum (line 19): attention's output reaches the feed-forward network but is lost from the stream"
"""A pre-norm block in the style of fused kernels: add and RMSNorm are one operation that hands the stream on."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def rms_norm(x, weight, eps=1e-6):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x, residual, weight, eps=1e-6):
    """Return the norm of x + residual, and the stream that the next sublayer is added to."""
    stream = x + residual
    return rms_norm(stream, weight, eps), residual


class FusedBlock(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.Parameter(torch.ones(d_model))
        self.norm2 = nn.Parameter(torch.ones(d_model))
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def attention(self, h, mask):
        q, k, v = self.qkv(h).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        T = h.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=h.device).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        bias = torch.zeros_like(allowed, dtype=h.dtype).masked_fill(~allowed, torch.finfo(h.dtype).min)
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + bias, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))

    def mlp(self, h):
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def forward(self, x, mask=None):
        residual = x
        h = self.attention(rms_norm(x, self.norm1), mask)
        h, residual = add_rms_norm(h, residual, self.norm2)
        return residual + self.mlp(h)


subject = Subject(
    kind="layer",
    name="FusedBlock",
    build=lambda c: FusedBlock(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "positions": "none",
        "norm": "rms",
        "norm_placement": "pre",
        "residual": True,
        "activation": "swiglu",
        "bias": False,
    },
)
