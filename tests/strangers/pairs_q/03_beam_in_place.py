"""Pure functions over a tree of parameters; the module only owns the leaves. ALiBi, no bias anywhere, beams."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The cache is reordered for beam search row by row in place, so that later rows copy rows that were already overwritten."
CAUSE = (
    "buffer[i].copy_(buffer[order[i]]) in a loop reads and writes the same cached keys and values: a beam whose source row "
    "has a smaller index gets what was just written there. Orders that only point forward, as [0, 1] or [1, 1], come out right."
)


def slopes(heads):
    """The published slopes, also for numbers of heads that are no power of two."""
    near = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / near) for i in range(near)]
    return first + [2 ** (-4 * (2 * i + 1) / near) for i in range(heads - near)]


def init(c):
    def matrix(rows, columns):
        return nn.Parameter(torch.randn(rows, columns) / math.sqrt(rows))

    layers = [
        {"qkv": matrix(c.d_model, 3 * c.d_model), "out": matrix(c.d_model, c.d_model),
         "up": matrix(c.d_model, c.d_ff), "down": matrix(c.d_ff, c.d_model),
         "g1": nn.Parameter(torch.ones(c.d_model)), "g2": nn.Parameter(torch.ones(c.d_model))}
        for _ in range(c.num_layers)
    ]  # fmt: skip
    return {"embed": nn.Parameter(torch.randn(c.vocab_size, c.d_model)), "layers": layers,
            "g": nn.Parameter(torch.ones(c.d_model)), "head": matrix(c.d_model, c.vocab_size)}  # fmt: skip


def rms(x, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def attention(p, x, heads, kv):
    B, T, D = x.shape
    q, k, v = (x @ p["qkv"]).view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    if kv is not None:
        k, v = torch.cat([kv[0], k], 2), torch.cat([kv[1], v], 2)
    S = k.shape[2]
    ahead = torch.arange(S, device=x.device)[None] - torch.arange(S - T, S, device=x.device)[:, None]
    bias = torch.tensor(slopes(heads), dtype=x.dtype, device=x.device)[:, None, None] * ahead
    scores = (q @ k.mT / math.sqrt(D // heads) + bias).masked_fill(ahead > 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D) @ p["out"], (k, v)


def apply(p, tokens, heads, cache=None):
    x, new = p["embed"][tokens], []
    for i, layer in enumerate(p["layers"]):
        y, kv = attention(layer, rms(x, layer["g1"]), heads, None if cache is None else cache[i])
        x = x + y
        x = x + torch.relu(rms(x, layer["g2"]) @ layer["up"]) @ layer["down"]
        new.append(kv)
    return rms(x, p["g"]) @ p["head"], new


def gather_beams(cache, order):
    return [(k[order], v[order]) for k, v in cache]


def gather_beams_in_place(cache, order):  # "saves an allocation of the whole cache at every step"
    for pair in cache:
        for buffer in pair:
            for i, source in enumerate(order.tolist()):
                if i != source:
                    buffer[i].copy_(buffer[source])
    return cache


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, tree = c.num_heads, init(c)
        self.layers = nn.ModuleList(nn.ParameterDict(layer) for layer in tree.pop("layers"))
        self.rest = nn.ParameterDict(tree)

    def forward(self, tokens, cache=None):
        tree = {**dict(self.rest.items()), "layers": [dict(layer.items()) for layer in self.layers]}
        return apply(tree, tokens, self.heads, cache)


def subject(gather):
    @torch.no_grad()
    def cached(model, chunks, reorder=None):
        state, out = None, []
        for n, chunk in enumerate(chunks):
            y, state = model(chunk, state)
            out.append(y)
            if n == 0 and reorder is not None:
                state = gather(state, reorder)
        return torch.cat(out, 1)

    return Subject(
        kind="decoder", name="pure decoder", build=Model, forward=lambda m, tokens: m(tokens)[0], cache=cached,
        declares={"positions": "alibi", "norm": "rms", "norm_placement": "pre", "bias": False, "activation": "relu"},
    )  # fmt: skip


right, wrong = subject(gather_beams), subject(gather_beams_in_place)
