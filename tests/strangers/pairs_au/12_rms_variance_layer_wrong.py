WHAT = 'RMSNorm divides by the standard deviation, about the mean that it does not subtract, instead of by the root mean square (line 17)'
import torch
from einops import rearrange, repeat
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        variance = x.var(dim=-1, unbiased=False, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.gamma


class GroupedAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, dim_head = heads, kv_heads, dim // heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * kv_heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x):
        q = rearrange(self.to_q(x), "b n (h d) -> b h n d", h=self.heads) * self.scale
        k, v = rearrange(self.to_kv(x), "b n (two g d) -> two b g n d", two=2, g=self.kv_heads)
        k, v = (repeat(t, "b g n d -> b (g r) n d", r=self.heads // self.kv_heads) for t in (k, v))
        sim = einsum("b h i d, b h j d -> b h i j", q, k)
        i, j = sim.shape[-2:]
        causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        attn = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max).softmax(dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.proj_in = nn.Linear(dim, 2 * hidden, bias=False)
        self.proj_out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        gate, x = rearrange(self.proj_in(x), "... (two d) -> two ... d", two=2)
        return self.proj_out(F.silu(gate) * x)


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.attn_norm, self.ff_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn, self.ff = GroupedAttention(dim, heads, kv_heads), SwiGLU(dim, hidden)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.ff(self.ff_norm(x))


subject = Subject(
    kind="layer",
    name="einops layer",
    build=lambda c: Layer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff),
    forward=lambda m, x: m(x),
    declares={
        "causal": True, "positions": "none", "norm": "rms", "norm_placement": "pre", "activation": "swiglu",
        "bias": False, "grouped_queries": True,
    },
)
