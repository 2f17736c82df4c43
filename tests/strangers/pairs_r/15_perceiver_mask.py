"""Perceiver for text classification, with heads folded into the batch as in the well known small implementations."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject


def sinusoids(n, dim, device):
    freqs = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(n, device=device)[:, None] * freqs
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :dim]


def heads_of_each_sample(mask, h):
    """b j -> (b h) () j"""
    return mask.repeat_interleave(h, dim=0).unsqueeze(1)


def heads_after_heads(mask, h):
    return mask.repeat(h, 1).unsqueeze(1)


class PreNorm(nn.Module):
    def __init__(self, dim, fn, context_dim=None):
        super().__init__()
        self.fn, self.norm = fn, nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(context_dim) if context_dim is not None else None

    def forward(self, x, context=None, **kwargs):
        if self.norm_context is None:
            return self.fn(self.norm(x), **kwargs)
        return self.fn(self.norm(x), context=self.norm_context(context), **kwargs)


class Attention(nn.Module):
    def __init__(self, dim, heads, spread=None):
        super().__init__()
        self.heads, self.scale, self.spread = heads, (dim // heads) ** -0.5, spread
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def fold(self, t):
        """b n (h d) -> (b h) n d"""
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, x, context=None, mask=None):
        b, n, d = x.shape
        k, v = self.to_kv(x if context is None else context).chunk(2, dim=-1)
        q, k, v = self.fold(self.to_q(x)), self.fold(k), self.fold(v)
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        if mask is not None:
            mask = self.spread(mask, self.heads)
            attn = sim.masked_fill(~mask, torch.finfo(sim.dtype).min).softmax(dim=-1) * mask
        else:
            attn = sim.softmax(dim=-1)
        out = einsum("b i j, b j d -> b i d", attn, v)
        return self.to_out(out.unflatten(0, (b, self.heads)).transpose(1, 2).reshape(b, n, d))


class Perceiver(nn.Module):
    def __init__(self, c, spread, num_latents=4):
        super().__init__()
        dim, ff = c.d_model, lambda: nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.token_emb = nn.Embedding(c.vocab_size, dim)
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.cross_attn = PreNorm(dim, Attention(dim, c.num_heads, spread), context_dim=dim)
        self.cross_ff = PreNorm(dim, ff())
        self.layers = nn.ModuleList(
            [nn.ModuleList([PreNorm(dim, Attention(dim, c.num_heads)), PreNorm(dim, ff())]) for _ in range(c.num_layers)]
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, c.num_classes))

    def forward(self, tokens, mask=None):
        data = self.token_emb(tokens)
        data = data + sinusoids(tokens.shape[1], data.shape[-1], data.device).to(data.dtype)
        x = self.latents.expand(tokens.shape[0], -1, -1)
        x = x + self.cross_attn(x, context=data, mask=mask)
        x = x + self.cross_ff(x)
        for attn, ff in self.layers:
            x = x + attn(x)
            x = x + ff(x)
        return self.to_logits(x.mean(dim=1))


right, wrong = (
    Subject(
        kind="classifier",
        name="Perceiver",
        build=lambda c, spread=spread: Perceiver(c, spread),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"padding_side": "right"},
    )
    for spread in (heads_of_each_sample, heads_after_heads)
)
WHAT = "The padding mask is tiled over the heads as (h b) while queries, keys and values are folded as (b h)."
CAUSE = (
    "In the cross-attention mask.repeat(h, 1) lays the samples out in another order than the folded heads: with more than one sample, heads of "
    "one sample are masked by the mask of another, so padding is attended to and samples influence one another."
)
