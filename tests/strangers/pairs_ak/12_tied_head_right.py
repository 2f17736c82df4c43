"""Decoder whose output projection is the token table."""
import torch
import torch.nn as nn
from einops import rearrange

from veriformer.properties import Subject


class PreNormBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_ff = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.ff = nn.Sequential(nn.Linear(dim, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, dim, bias=False))

    def forward(self, x):
        q, k, v = rearrange(self.to_qkv(self.norm_attn(x)), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        attn = sim.masked_fill(future, -torch.finfo(sim.dtype).max).softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        x = x + self.to_out(rearrange(out, "b h n d -> b n (h d)"))
        return x + self.ff(self.norm_ff(x))


class TiedDecoder(nn.Module):
    def __init__(self, num_tokens, dim, depth, heads, hidden, max_seq_len):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList([PreNormBlock(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)
        nn.init.normal_(self.token_emb.weight, std=dim**-0.5)
        self.to_logits.weight = self.token_emb.weight

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.to_logits(self.norm(x))


subject = Subject(
    kind="decoder",
    name="decoder with a tied head",
    build=lambda c: TiedDecoder(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "relu", "bias": False, "tied": True,
    },
)
