"""BLOOM-like decoder in functional style; sample() was extended from one prompt to a batch."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def alibi_slopes(n):
    def powers(m):
        return [2 ** (-8 * (i + 1) / m) for i in range(m)]

    if math.log2(n).is_integer():
        return powers(n)
    lower = 2 ** math.floor(math.log2(n))
    return powers(lower) + powers(2 * lower)[0::2][: n - lower]


def alibi(heads, length, like):
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
    t = torch.arange(length)
    bias = (slopes[:, None, None] * (t[None, :] - t[:, None])).to(like)
    return bias.masked_fill(t[None, :].to(like.device) > t[:, None].to(like.device), float("-inf"))


def attend(x, qkv, out, heads, bias):
    b, t, d = x.shape
    q, k, v = qkv(x).view(b, t, heads, 3, d // heads).permute(3, 0, 2, 1, 4)
    w = torch.baddbmm(
        bias.repeat(b, 1, 1), q.reshape(b * heads, t, -1), k.reshape(b * heads, t, -1).mT, alpha=(d // heads) ** -0.5
    ).softmax(-1)
    y = torch.bmm(w, v.reshape(b * heads, t, -1)).view(b, heads, t, -1)
    return out(y.transpose(1, 2).reshape(b, t, d))


class Bloom(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.heads, self.depth = c.num_heads, c.num_layers
        self.embed = nn.Embedding(c.vocab_size, d)
        self.embed_norm, self.final_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        for i in range(c.num_layers):
            self.add_module(f"ln1_{i}", nn.LayerNorm(d))
            self.add_module(f"qkv_{i}", nn.Linear(d, 3 * d))
            self.add_module(f"out_{i}", nn.Linear(d, d))
            self.add_module(f"ln2_{i}", nn.LayerNorm(d))
            self.add_module(f"up_{i}", nn.Linear(d, c.d_ff))
            self.add_module(f"down_{i}", nn.Linear(c.d_ff, d))

    def forward(self, tokens):
        x = self.embed_norm(self.embed(tokens))
        bias = alibi(self.heads, tokens.shape[1], x)
        for i in range(self.depth):
            ln1, qkv, out, ln2, up, down = (
                self.get_submodule(f"{n}_{i}") for n in ("ln1", "qkv", "out", "ln2", "up", "down")
            )
            x = x + attend(ln1(x), qkv, out, self.heads, bias)
            x = x + down(F.gelu(up(ln2(x)), approximate="tanh"))
        return F.linear(self.final_norm(x), self.embed.weight)


def warp(logits, temperature=1.0, top_k=None):
    """Logits [B, V] as they are drawn from: divided by the temperature, all but the top_k of each row at -inf."""
    logits = logits / temperature
    if top_k is not None:
        best, _ = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1)
        logits = logits.masked_fill(logits < best.amin(-1, keepdim=True), float("-inf"))
    return logits


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = warp(model(tokens)[:, -1], temperature, top_k)
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        drawn_from.append(logits)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="BLOOM with batched sampling",
    build=Bloom,
    forward=lambda model, tokens: model(tokens),
    sampling=sample,
    declares={
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
    },
)
