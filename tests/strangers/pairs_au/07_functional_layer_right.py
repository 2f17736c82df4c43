"""An encoder layer as plain functions over a dictionary of parameters."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def init_params(d_model, d_ff):
    def mat(n_in, n_out):
        return nn.Parameter(torch.randn(n_in, n_out) / n_in**0.5)

    def vec(n, value):
        return nn.Parameter(torch.full((n,), value))

    return nn.ParameterDict({
        "wq": mat(d_model, d_model), "wk": mat(d_model, d_model), "wv": mat(d_model, d_model),
        "wo": mat(d_model, d_model), "bo": vec(d_model, 0.0),
        "w1": mat(d_model, d_ff), "b1": vec(d_ff, 0.0), "w2": mat(d_ff, d_model), "b2": vec(d_model, 0.0),
        "g1": vec(d_model, 1.0), "h1": vec(d_model, 0.0), "g2": vec(d_model, 1.0), "h2": vec(d_model, 0.0),
    })


def norm(x, gain, shift):
    return F.layer_norm(x, x.shape[-1:]) * gain + shift


def attend(p, x, heads, allowed):
    split = lambda y: y.unflatten(-1, (heads, -1)).movedim(-2, 1)
    q, k, v = split(x @ p["wq"]), split(x @ p["wk"]), split(x @ p["wv"])
    scores = torch.einsum("bhik,bhjk->bhij", q, k) * k.shape[-1] ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, None, None, :], torch.finfo(scores.dtype).min)
    mixed = torch.einsum("bhij,bhjk->bhik", scores.softmax(-1), v)
    return mixed.movedim(1, -2).flatten(-2) @ p["wo"] + p["bo"]


def feed_forward(p, x):
    return F.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def encoder_layer(p, x, heads, allowed=None):
    x = norm(x + attend(p, x, heads, allowed), p["g1"], p["h1"])
    return norm(x + feed_forward(p, x), p["g2"], p["h2"])


class Holder(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.params = init_params(d_model, d_ff)


subject = Subject(
    kind="layer",
    name="functional encoder layer",
    build=lambda c: Holder(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: encoder_layer(m.params, x, m.heads, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "post", "activation": "gelu"},
)
