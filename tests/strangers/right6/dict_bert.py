"""BERT with segments, as pure functions over a flat dictionary of weights."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def make_weights(c):
    d, w = c.d_model, {}

    def linear(name, i, o):
        w[f"{name}_w"], w[f"{name}_b"] = torch.randn(o, i) / math.sqrt(i), torch.zeros(o)

    def norm(name):
        w[f"{name}_g"], w[f"{name}_b"] = torch.ones(d), torch.zeros(d)

    w["words"], w["places"], w["segments"] = (torch.randn(n, d) for n in (c.vocab_size, c.max_len, 2))
    norm("embedding_norm")
    for i in range(c.num_layers):
        for part in ("query", "key", "value", "out"):
            linear(f"{i}_{part}", d, d)
        linear(f"{i}_up", d, c.d_ff)
        linear(f"{i}_down", c.d_ff, d)
        norm(f"{i}_norm1")
        norm(f"{i}_norm2")
    return w


def linear(w, name, x):
    return F.linear(x, w[f"{name}_w"], w[f"{name}_b"])


def norm(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}_g"], w[f"{name}_b"], 1e-12)


def attend(w, i, x, mask, heads):
    def split(z):
        return z.unflatten(-1, (heads, -1)).movedim(-2, -3)

    q, k, v = (split(linear(w, f"{i}_{part}", x)) for part in ("query", "key", "value"))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = torch.where(mask[..., None, None, :], scores, torch.finfo(scores.dtype).min)
    return linear(w, f"{i}_out", (scores.softmax(-1) @ v).movedim(-3, -2).flatten(-2))


def bert(w, tokens, mask, segments, heads, layers):
    if segments is None:
        segments = torch.zeros_like(tokens)
    places = w["places"][torch.arange(tokens.shape[-1], device=tokens.device)]
    x = norm(w, "embedding_norm", w["words"][tokens] + places + w["segments"][segments])
    for i in range(layers):
        x = norm(w, f"{i}_norm1", x + attend(w, i, x, mask, heads))
        x = norm(w, f"{i}_norm2", x + linear(w, f"{i}_down", F.gelu(linear(w, f"{i}_up", x))))
    return x


class Holder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w = nn.ParameterDict(make_weights(c))
        self.heads, self.layers = c.num_heads, c.num_layers

    def forward(self, tokens, mask=None, segments=None):
        return bert(self.w, tokens, mask, segments, self.heads, self.layers)


def forward(model, tokens, attention_mask=None):
    return model(tokens, None if attention_mask is None else attention_mask.bool())


declared = Subject(
    kind="encoder", name="dict BERT", build=Holder, forward=forward,
    declares={
        "causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "residual": True,
        "activation": "gelu", "bias": True, "padding_side": "right", "beyond_max_len": "error",
        "attention_scale": "1/sqrt(d_head)", "embedding_scale": False,
    },
)
undeclared = Subject(kind="encoder", build=Holder, forward=forward)
