"""StreamingLLM: a sliding window besides which the first tokens stay visible, and a cache that forgets all others."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW, SINKS = 4, 2


class SinkCache:
    """Keys, values and positions of one layer."""

    def __init__(self, recent):
        self.recent = recent
        self.kept = None

    def __len__(self):
        return 0 if self.kept is None else int(self.kept[2][-1]) + 1

    def extend(self, k, v, places):
        if self.kept is not None:
            k, v = torch.cat([self.kept[0], k], 2), torch.cat([self.kept[1], v], 2)
            places = torch.cat([self.kept[2], places])
        self.kept = k, v, places
        return self.kept

    def evict(self):
        k, v, places = self.kept
        stays = (places < SINKS) | (places > places[-1] - self.recent)
        self.kept = k[:, :, stays], v[:, :, stays], places[stays]


def rope(x, places):
    pairs = x.unflatten(-1, (2, -1))
    rates = torch.exp(-math.log(10000.0) * torch.arange(pairs.shape[-1], device=x.device).double() / pairs.shape[-1])
    angles = places.double()[:, None] * rates
    c, s = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = pairs.unbind(-2)
    return torch.cat((a * c - b * s, a * s + b * c), -1)


class Block(nn.Module):
    def __init__(self, d_model, n_head, d_ff):
        super().__init__()
        if (d_model // n_head) % 2:
            raise ValueError("head width must be even")
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.c_attn, self.c_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.c_fc, self.c_out = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def attend(self, x, places, cache):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        q, k = rope(q, places), rope(k, places)
        k, v, there = (k, v, places) if cache is None else cache.extend(k, v, places)
        back = places[:, None] - there[None, :]
        visible = (back >= 0) & ((back < WINDOW) | (there < SINKS)[None, :])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        if cache is not None:
            cache.evict()
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x, places, cache=None):
        x = x + self.attend(self.ln_1(x), places, cache)
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class StreamingGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx, caches=None):
        start = 0 if caches is None else len(caches[0])
        places = torch.arange(start, start + idx.shape[1], device=idx.device)
        x = self.wte(idx)
        for i, block in enumerate(self.h):
            x = block(x, places, None if caches is None else caches[i])
        return self.lm_head(self.ln_f(x))


def subject(name, recent):
    def cache(model, chunks):
        caches = [SinkCache(recent) for _ in model.h]
        return torch.cat([model(chunk, caches) for chunk in chunks], 1)

    return Subject(
        kind="decoder",
        name=name,
        build=StreamingGPT,
        forward=lambda m, tokens: m(tokens),
        cache=cache,
        declares={"causal": True, "window": WINDOW, "sink_tokens": SINKS, "positions": "rotary", "layout": "halves",
                  "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
    )


right = subject("streaming GPT", WINDOW)
wrong = subject("streaming GPT, sinks in the budget", WINDOW - SINKS)

WHAT = "The cache keeps window - sinks recent tokens (sinks and recent ones share one budget), while the mask has the whole window besides the sinks."
CAUSE = (
    "SinkCache.evict drops keys that are still inside the sliding window of the next query: cached steps see only the sinks and "
    "the last window - sinks tokens, the full forward sees the sinks and the last window tokens."
)
