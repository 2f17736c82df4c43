"""DeepSeek V2 style decoder with multi-head latent attention: keys and values come from one normalised latent per token.

Unusual: `forward` expands the latent to keys and values, `cache` keeps only the latent and the one rotary key that all
heads share and multiplies the up-projection into the query ("absorbed"). Both give the same numbers. A head is half
rotary, half not, so its width is d_model / heads and the scale stays 1/sqrt(d_head).
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def precompute_freqs_cis(start, stop, dim, like):
    freqs = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) / dim)
    angles = torch.outer(torch.arange(start, stop, dtype=torch.float64, device=like.device), freqs)
    return torch.polar(torch.ones_like(angles), angles).to(torch.promote_types(like.dtype, torch.complex64))


def apply_rotary_emb(x, freqs_cis):  # x [b, t, h, d]
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(wide).contiguous().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[None, :, None, :]).flatten(3).to(x.dtype)


class MLA(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.head = dim // n_heads
        self.rope = self.head // 2
        self.nope = self.head - self.rope
        self.rank = max(4, dim // 2)
        self.softmax_scale = 1.0 / math.sqrt(self.head)
        self.wq = nn.Linear(dim, n_heads * self.head, bias=False)
        self.wkv_a = nn.Linear(dim, self.rank + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(self.rank, eps=1e-6)
        self.wkv_b = nn.Linear(self.rank, n_heads * (self.nope + self.head), bias=False)
        self.wo = nn.Linear(n_heads * self.head, dim, bias=False)

    def queries_and_latent(self, x, freqs_cis):
        b, t, _ = x.shape
        q_nope, q_pe = self.wq(x).view(b, t, self.n_heads, self.head).split([self.nope, self.rope], dim=-1)
        latent, k_pe = self.wkv_a(x).split([self.rank, self.rope], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), freqs_cis).squeeze(2)
        return q_nope, apply_rotary_emb(q_pe, freqs_cis), self.kv_norm(latent), k_pe

    def probabilities(self, scores, allowed):  # [b, h, t, s]
        scores = scores * self.softmax_scale
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1).masked_fill(~allowed, 0)

    def forward(self, x, freqs_cis, allowed):
        q_nope, q_pe, latent, k_pe = self.queries_and_latent(x, freqs_cis)
        b, t, _ = x.shape
        k_nope, v = self.wkv_b(latent).view(b, t, self.n_heads, -1).split([self.nope, self.head], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, self.n_heads, -1)], dim=-1)
        probs = self.probabilities(torch.einsum("bthd,bshd->bhts", q, k), allowed)
        return self.wo(torch.einsum("bhts,bshd->bthd", probs, v).flatten(2))

    def step(self, x, freqs_cis, allowed, memory):
        q_nope, q_pe, latent, k_pe = self.queries_and_latent(x, freqs_cis)
        if memory:
            latent = torch.cat([memory["latent"], latent], dim=1)
            k_pe = torch.cat([memory["k_pe"], k_pe], dim=1)
        memory.update(latent=latent, k_pe=k_pe)
        up = self.wkv_b.weight.view(self.n_heads, self.nope + self.head, self.rank)
        absorbed = torch.einsum("bthd,hdr->bthr", q_nope, up[:, : self.nope])
        scores = torch.einsum("bthr,bsr->bhts", absorbed, latent) + torch.einsum("bthp,bsp->bhts", q_pe, k_pe)
        context = torch.einsum("bhts,bsr->bthr", self.probabilities(scores, allowed), latent)
        return self.wo(torch.einsum("bthr,hdr->bthd", context, up[:, self.nope :]).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = MLA(c.d_model, c.num_heads)
        self.ffn_norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.w13 = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def mlp(self, x):
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)

    def forward(self, x, freqs_cis, allowed, memory=None):
        normed = self.attn_norm(x)
        if memory is None:
            x = x + self.attn(normed, freqs_cis, allowed)
        else:
            x = x + self.attn.step(normed, freqs_cis, allowed, memory)
        return x + self.mlp(self.ffn_norm(x))


class LatentTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, memories=None, start=0):
        x = self.embed(tokens)
        stop = start + tokens.size(1)
        freqs_cis = precompute_freqs_cis(start, stop, self.layers[0].attn.rope, x)
        allowed = torch.ones(stop, stop, dtype=torch.bool, device=x.device).tril()[start:]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :stop]
        for i, layer in enumerate(self.layers):
            x = layer(x, freqs_cis, allowed, None if memories is None else memories[i])
        return self.head(self.norm(x))


def cache(model, chunks, attention_mask=None):
    memories, start, outputs = [{} for _ in model.layers], 0, []
    for chunk in chunks:
        outputs.append(model(chunk, attention_mask, memories, start))
        start += chunk.size(1)
    return torch.cat(outputs, dim=1)


COMMON = dict(
    kind="decoder",
    build=LatentTransformer,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cache,
    mask_forms=("padding",),
    domain={"d_model": [16, 32], "num_heads": [2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "padding_side": "both",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "structure": "other",
    },
)
