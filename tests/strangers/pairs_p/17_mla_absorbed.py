"""DeepSeek's multi-head latent attention: training expands the latents, decoding absorbs the expansion into the queries."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rms(x, gain, eps=1e-6):
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return rms(x, self.gain)


def turn(x, start):
    """Rotary positions on [B, T, ..., R], neighbours are pairs; the first of the T stands at `start`."""
    t, r = x.shape[1], x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, r, 2, dtype=torch.float64, device=x.device) / r)
    angles = torch.arange(start, start + t, dtype=torch.float64, device=x.device)[:, None] * rates
    angles = angles.view(t, *[1] * (x.dim() - 3), r // 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class MLA(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.e = heads, dim // heads  # heads, width of a value
        self.r = 2 * (self.e // 4)  # channels of a query that are turned
        self.n = self.e - self.r  # the others
        if self.r < 2:
            raise ValueError("heads of 4 channels or more")
        self.rank = dim // 2 + 1
        self.wq = nn.Linear(dim, heads * (self.n + self.r), bias=False)
        self.wkv_a = nn.Linear(dim, self.rank + self.r, bias=False)
        self.kv_norm = Norm(self.rank)
        self.wkv_b = nn.Linear(self.rank, heads * (self.n + self.e), bias=False)
        self.wo = nn.Linear(heads * self.e, dim, bias=False)
        self.softmax_scale = (self.n + self.r) ** -0.5

    def compress(self, x, start):
        q_plain, q_turned = self.wq(x).unflatten(-1, (self.h, -1)).split([self.n, self.r], -1)
        latent, k_turned = self.wkv_a(x).split([self.rank, self.r], -1)
        return q_plain, turn(q_turned, start), self.kv_norm(latent), turn(k_turned, start)

    def expanded(self, x):
        b, t, _ = x.shape
        q_plain, q_turned, latent, k_turned = self.compress(x, 0)
        k_plain, v = self.wkv_b(latent).unflatten(-1, (self.h, -1)).split([self.n, self.e], -1)
        q = torch.cat([q_plain, q_turned], -1)
        k = torch.cat([k_plain, k_turned.unsqueeze(2).expand(-1, -1, self.h, -1)], -1)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.softmax_scale
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.wo(torch.einsum("bhts,bshe->bthe", p, v).flatten(2))

    def scale_of(self, q_latent):
        return self.softmax_scale

    def absorbed(self, x, past):
        """Attend in the space of the latents; `past` is (latents, turned keys) or None."""
        start = 0 if past is None else past[0].shape[1]
        q_plain, q_turned, latent, k_turned = self.compress(x, start)
        if past is not None:
            latent, k_turned = torch.cat([past[0], latent], 1), torch.cat([past[1], k_turned], 1)
        up_k, up_v = self.wkv_b.weight.view(self.h, self.n + self.e, self.rank).split([self.n, self.e], 1)
        q_latent = torch.einsum("bthn,hnc->bthc", q_plain, up_k)
        scores = torch.einsum("bthc,bsc->bhts", q_latent, latent) + torch.einsum("bthr,bsr->bhts", q_turned, k_turned)
        scores = scores * self.scale_of(q_latent)
        future = torch.ones(start + x.shape[1], start + x.shape[1], dtype=torch.bool, device=x.device).triu(1)[start:]
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhts,bsc->bthc", p, latent)
        return self.wo(torch.einsum("bthc,hec->bthe", mixed, up_v).flatten(2)), (latent, k_turned)


class MLAOwnScale(MLA):
    def scale_of(self, q_latent):
        return (q_latent.shape[-1] + self.r) ** -0.5


class DeepSeek(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        n, d = c.num_layers, c.d_model
        self.embed = nn.Embedding(c.vocab_size, d)
        self.norms = nn.ModuleList([nn.ModuleList([Norm(d), Norm(d)]) for _ in range(n)])
        self.attns = nn.ModuleList([attention(d, c.num_heads) for _ in range(n)])
        self.mlps = nn.ModuleList([nn.ModuleList([nn.Linear(d, c.d_ff, bias=False), nn.Linear(d, c.d_ff, bias=False),
                                                  nn.Linear(c.d_ff, d, bias=False)]) for _ in range(n)])  # fmt: skip
        self.norm, self.head = Norm(d), nn.Linear(d, c.vocab_size, bias=False)

    def run(self, tokens, attend):
        x = self.embed(tokens)
        for i, ((norm_1, norm_2), (w1, w3, w2)) in enumerate(zip(self.norms, self.mlps)):
            x = x + attend(i, norm_1(x))
            h = norm_2(x)
            x = x + w2(F.silu(w1(h)) * w3(h))
        return self.head(self.norm(x))

    def forward(self, tokens):
        return self.run(tokens, lambda i, h: self.attns[i].expanded(h))

    def decode(self, tokens, cache):
        def attend(i, h):
            y, cache[i] = self.attns[i].absorbed(h, cache.get(i))
            return y

        return self.run(tokens, attend)


def in_chunks(model, chunks):
    cache = {}
    return torch.cat([model.decode(chunk, cache) for chunk in chunks], 1)


def subject(attention):
    return Subject(
        kind="decoder",
        name=f"DeepSeek with {attention.__name__}",
        build=lambda c: DeepSeek(c, attention),
        forward=lambda m, tokens: m(tokens),
        cache=in_chunks,
    )


right, wrong = subject(MLA), subject(MLAOwnScale)

WHAT = "The absorbed (cached) path scales scores by 1/sqrt(rank + rope) of the absorbed queries, the expanded one by 1/sqrt(nope + rope)."
CAUSE = (
    "In decoding with the cache the scale is taken from the width of the query after wkv_b was absorbed into it, which is the rank "
    "of the latents, and not from the width of a head: the temperature of the softmax differs from that of the full forward."
)
