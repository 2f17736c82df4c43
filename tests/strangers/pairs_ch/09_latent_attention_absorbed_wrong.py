"""Latent attention (MLA): the cache holds the latents alone, and decoding multiplies the up-projections into q and o."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class LatentAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.size, self.rank = heads, dim // heads, max(1, 3 * dim // 4)
        self.q = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, self.rank, bias=False)
        self.up_k = nn.Linear(self.rank, dim, bias=False)
        self.up_v = nn.Linear(self.rank, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        latent = self.down(x)
        q, k, v = (
            z.view(b, t, self.heads, self.size).transpose(1, 2) for z in (self.q(x), self.up_k(latent), self.up_v(latent))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))

    def absorbed(self, x, past):
        """The same from cached latents [B, S, R]: no key and no value is made."""
        b, t, d = x.shape
        latent = torch.cat([past, self.down(x)], 1)
        q = self.q(x).view(b, t, self.heads, self.size)
        q = torch.einsum("bthk,hkr->bhtr", q, self.up_k.weight.view(self.heads, self.size, self.rank))
        scores = torch.einsum("bhtr,bsr->bhts", q, latent) * q.shape[-1] ** -0.5
        seen = torch.ones(t, latent.shape[1], dtype=torch.bool, device=x.device).tril(past.shape[1])
        mixed = torch.einsum("bhts,bsr->bthr", scores.masked_fill(~seen, float("-inf")).softmax(-1), latent)
        y = torch.einsum("bthr,hkr->bthk", mixed, self.up_v.weight.view(self.heads, self.size, self.rank))
        return self.o(y.reshape(b, t, d)), latent


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention = LatentAttention(dim, heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, past=None):
        z = self.norm_1(x)
        if past is None:
            x = x + self.attention(z)
        else:
            y, past = self.attention.absorbed(z, past)
            x = x + y
        return x + self.ff(self.norm_2(x)), past


class LatentLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed, self.position = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.lm_head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, pasts=None):
        done = 0 if pasts is None else pasts[0].shape[1]
        x = self.embed(tokens) + self.position.weight[done : done + tokens.shape[1]]
        new = []
        for i, layer in enumerate(self.layers):
            x, past = layer(x, None if pasts is None else pasts[i])
            new.append(past)
        return self.lm_head(self.norm(x)), new


def decode(model, chunks):
    first = model.embed.weight
    pasts = [first.new_zeros(chunks[0].shape[0], 0, layer.attention.rank) for layer in model.layers]
    outs = []
    for chunk in chunks:
        logits, pasts = model(chunk, pasts)
        outs.append(logits)
    return torch.cat(outs, 1)


subject = Subject(
    kind="decoder",
    name="latent attention",
    build=LatentLM,
    forward=lambda m, tokens: m(tokens)[0],
    cache=decode,
    declares={"positions": "learned", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)

WHAT = "In the absorbed path q has the width of the latent, and the scores are divided by its root instead of that of the head's width: cached decoding differs from the forward (line 34)."
