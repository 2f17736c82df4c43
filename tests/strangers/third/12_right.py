import torch
from torch import nn


def exists(v):
    return v is not None


def default(v, d):
    return v if exists(v) else d


class GEGLU(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * nn.functional.gelu(gate)


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=4, dim_head=16):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)
        self.scale = dim_head ** -0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(context_dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def fold(self, t):
        # b n (h d) -> (b h) n d
        b, n, _ = t.shape
        return t.view(b, n, self.heads, -1).transpose(1, 2).reshape(b * self.heads, n, -1)

    def unfold(self, t):
        # (b h) n d -> b n (h d)
        bh, n, d = t.shape
        return t.view(bh // self.heads, self.heads, n, d).transpose(1, 2).reshape(bh // self.heads, n, -1)

    def forward(self, x, context=None, mask=None):
        h = self.heads
        context = default(context, x)
        q = self.fold(self.to_q(x))
        k, v = map(self.fold, self.to_kv(context).chunk(2, dim=-1))

        sim = torch.einsum('b i d, b j d -> b i j', q, k) * self.scale
        if exists(mask):
            mask = mask.repeat_interleave(h, dim=0).unsqueeze(1)
            sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)

        attn = sim.softmax(dim=-1)
        out = torch.einsum('b i j, b j d -> b i d', attn, v)
        return self.to_out(self.unfold(out))


class CrossAttentionBlock(nn.Module):
    """x: (b, n, dim), context: (b, m, context_dim), mask: (b, m) bool, True = attend."""

    def __init__(self, dim=32, context_dim=48, heads=4, dim_head=16, mult=2):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(context_dim)
        self.attn = CrossAttention(dim, context_dim, heads, dim_head)
        self.norm2 = nn.LayerNorm(dim)
        self.ff = nn.Sequential(GEGLU(dim, dim * mult), nn.Linear(dim * mult, dim))

    def forward(self, x, context, mask=None):
        x = self.attn(self.norm1(x), self.norm_context(context), mask=mask) + x
        x = self.ff(self.norm2(x)) + x
        return x
