import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FusedAddRMSNorm(nn.Module):
    """(hidden, residual) -> (norm(hidden + residual), hidden + residual), as serving engines have it."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, hidden, residual=None):
        if residual is not None:
            hidden = hidden + residual
        residual = hidden
        var = hidden.pow(2).mean(-1, keepdim=True)
        return hidden * torch.rsqrt(var + self.eps) * self.weight, residual


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.input_norm, self.post_norm = FusedAddRMSNorm(c.d_model), FusedAddRMSNorm(c.d_model)
        self.qkv_proj = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.o_proj = nn.Linear(c.d_model, c.d_model, bias=False)
        self.gate_up = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def attention(self, x, mask):
        b, t, d = x.shape
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv_proj(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None, :])
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))

    def mlp(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(self, x, attention_mask=None):
        h, residual = self.input_norm(x)
        h = self.attention(h, attention_mask)
        h, residual = self.post_norm(h, residual)
        return self.mlp(h) + residual


subject = Subject(
    kind="layer",
    name="engine-style block",
    build=Block,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "none", "norm": "rms", "norm_placement": "pre", "activation": "swiglu",
              "residual": True, "bias": False},
)
