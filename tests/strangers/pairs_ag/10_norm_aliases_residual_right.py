"""A pre-norm layer (RMSNorm, SwiGLU) whose norm has an allocation-free path for inference."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        acc = torch.promote_types(x.dtype, torch.float32)  # statistics never in half precision
        if torch.is_grad_enabled():
            h = x.to(acc)
            return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight
        h = x.to(acc, copy=True)
        h.mul_(torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps))
        return h.to(x.dtype).mul_(self.weight)


class Layer(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def attention(self, x):
        B, T, D = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.n_heads, D // self.n_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, D))

    def feed_forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


subject = Subject(
    kind="layer",
    name="llama-like layer",
    build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"causal": True, "positions": "none", "norm": "rms", "norm_placement": "pre", "activation": "swiglu", "bias": False, "residual": True},
)
