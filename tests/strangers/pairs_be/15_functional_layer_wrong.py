WHAT = "the stream is overwritten by its norm before the feed-forward network, so that the residual added there is the normalised stream, although the layer is meant to be pre-norm: line 33."
"""A pre-norm layer in functional style: parameters in a dict, a function for each thing."""

import torch
from torch import nn

from veriformer.properties import Subject


def layer_norm(x, gain, bias):
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * gain + bias


def attend(p, x, mask, heads):
    b, t, d = x.shape
    q, k, v = (torch.einsum("btd,de->bte", x, p[n]).view(b, t, heads, -1) for n in ("wq", "wk", "wv"))
    logits = torch.einsum("bthk,bshk->bhts", q, k) / (d // heads) ** 0.5
    if mask is not None:
        logits = torch.where(mask[:, None, None, :], logits, torch.finfo(logits.dtype).min)
    mixed = torch.einsum("bhts,bshk->bthk", torch.softmax(logits, -1), v)
    return torch.einsum("bte,ed->btd", mixed.reshape(b, t, d), p["wo"])


def mlp(p, x):
    return nn.functional.gelu(x @ p["w_in"] + p["b_in"], approximate="tanh") @ p["w_out"] + p["b_out"]


def block(p, x, mask, heads):
    h = layer_norm(x, p["g1"], p["b1"])
    x = x + attend(p, h, mask, heads)
    x = layer_norm(x, p["g2"], p["b2"])
    x = x + mlp(p, x)
    return x


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        dense = {"wq": (d, d), "wk": (d, d), "wv": (d, d), "wo": (d, d), "w_in": (d, d_ff), "w_out": (d_ff, d)}
        shapes = {name: torch.randn(shape) * shape[0] ** -0.5 for name, shape in dense.items()}
        ones = {"g1": torch.ones(d), "g2": torch.ones(d)}
        zeros = {"b1": torch.zeros(d), "b2": torch.zeros(d), "b_in": torch.zeros(d_ff), "b_out": torch.zeros(d)}
        self.p = nn.ParameterDict({n: nn.Parameter(t) for n, t in {**shapes, **ones, **zeros}.items()})

    def forward(self, x, mask=None):
        return block(self.p, x, mask, self.heads)


subject = Subject(
    kind="layer",
    name="functional layer",
    build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu_tanh",
    },
)
