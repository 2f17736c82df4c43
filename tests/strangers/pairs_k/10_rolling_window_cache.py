"""A decoder with a sliding window and a rolling cache, after Mistral."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The rolling cache evicts old keys before the new chunk attends, so a chunk's first tokens miss keys inside their window."
CAUSE = (
    "When a chunk of several tokens is decoded behind a cache, keys that are still inside the window of the chunk's "
    "earlier tokens have been evicted: the cache is cut to the window before attention instead of after."
)
WINDOW = 4


def make(cut_after):
    class WindowAttention(nn.Module):
        def __init__(self, dim, n_heads):
            super().__init__()
            self.n_heads, self.scale = n_heads, (dim // n_heads) ** -0.5
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

        def forward(self, x, place, state=None):
            split = lambda t: t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # noqa: E731
            q, k, v = split(self.wq(x)), split(self.wk(x)), split(self.wv(x))
            at = place
            if state is not None:
                k, v, at = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2), torch.cat((state[2], at))
                if not cut_after:
                    k, v, at = k[:, :, -WINDOW:], v[:, :, -WINDOW:], at[-WINDOW:]
            seen = (at <= place[:, None]) & (at > place[:, None] - WINDOW)
            scores = torch.einsum("bhqd,bhkd->bhqk", q * self.scale, k)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
            y = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).flatten(2)
            return self.wo(y), (k[:, :, -WINDOW:], v[:, :, -WINDOW:], at[-WINDOW:])

    class Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.attention = WindowAttention(c.d_model, c.num_heads)
            self.attention_norm, self.ffn_norm = nn.RMSNorm(c.d_model, eps=1e-5), nn.RMSNorm(c.d_model, eps=1e-5)
            self.w1, self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
            self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

        def forward(self, x, place, state):
            y, state = self.attention(self.attention_norm(x), place, state)
            x = x + y
            y = self.ffn_norm(x)
            return x + self.w2(F.silu(self.w1(y)) * self.w3(y)), state

    class Mistral(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
            self.positions = nn.Embedding(c.max_len, c.d_model)
            self.layers = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
            self.norm, self.output = nn.RMSNorm(c.d_model, eps=1e-5), nn.Linear(c.d_model, c.vocab_size, bias=False)

        def forward(self, tokens, states=None, start=0):
            place = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            x = self.tok_embeddings(tokens) + self.positions(place)
            states = states or [None] * len(self.layers)
            after = []
            for layer, state in zip(self.layers, states):
                x, state = layer(x, place, state)
                after.append(state)
            return self.output(self.norm(x)), after

    return Mistral


def cached(model, chunks):
    states, start, out = None, 0, []
    for chunk in chunks:
        logits, states = model(chunk, states, start)
        start += chunk.shape[1]
        out.append(logits)
    return torch.cat(out, 1)


def subject(cut_after):
    return Subject(
        kind="decoder",
        name="sliding window with a rolling cache",
        build=make(cut_after),
        forward=lambda m, tokens: m(tokens)[0],
        cache=cached,
        declares={
            "causal": True,
            "window": WINDOW,
            "positions": "learned",
            "norm": "rms",
            "norm_placement": "pre",
            "activation": "swiglu",
            "bias": False,
        },
    )


right = subject(True)
wrong = subject(False)
