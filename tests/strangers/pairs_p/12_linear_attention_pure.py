"""Causal linear attention (Katharopoulos et al. 2020), written as pure functions of a tree of parameters."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import elu, gelu, layer_norm

from veriformer.properties import Subject

# ---------------------------------------------------------------- initialisation


def init_linear(n_in, n_out):
    return nn.ParameterDict({"w": torch.randn(n_in, n_out) * n_in**-0.5, "b": torch.zeros(n_out)})


def init_norm(n):
    return nn.ParameterDict({"scale": torch.ones(n), "offset": torch.zeros(n)})


def init_block(d, f):
    return nn.ModuleDict(
        {
            "norm_1": init_norm(d),
            "q": init_linear(d, d),
            "k": init_linear(d, d),
            "v": init_linear(d, d),
            "o": init_linear(d, d),
            "norm_2": init_norm(d),
            "up": init_linear(d, f),
            "down": init_linear(f, d),
        }
    )


# ---------------------------------------------------------------- application


def linear(p, x):
    return x @ p["w"] + p["b"]


def norm(p, x):
    return layer_norm(x, x.shape[-1:], p["scale"], p["offset"])


def phi(x):
    return elu(x) + 1


def running(k):
    """sum_{s <= t} phi(k_s), for every t."""
    return k.cumsum(1)


def overall(k):
    """sum_s phi(k_s)."""
    return k.sum(1, keepdim=True)


def attend(p, x, num_heads, normaliser):
    q, k, v = (linear(p[name], x).unflatten(-1, (num_heads, -1)) for name in "qkv")
    q, k = phi(q), phi(k)
    state = torch.einsum("bshk,bshe->bshke", k, v).cumsum(1)
    numerator = torch.einsum("bthk,bthke->bthe", q, state)
    denominator = (q * normaliser(k)).sum(-1, keepdim=True)
    return linear(p["o"], (numerator / denominator).flatten(2))


def block(p, x, num_heads, normaliser):
    x = x + attend(p, norm(p["norm_1"], x), num_heads, normaliser)
    return x + linear(p["down"], gelu(linear(p["up"], norm(p["norm_2"], x))))


def apply(params, tokens, *, num_heads, normaliser):
    x = params["embed"]["table"][tokens] + params["embed"]["places"][: tokens.shape[1]]
    for name in sorted(params["blocks"], key=int):
        x = block(params["blocks"][name], x, num_heads, normaliser)
    return linear(params["logits"], norm(params["norm"], x))


class Model(nn.Module):
    """Holds the tree, nothing else."""

    def __init__(self, c, normaliser):
        super().__init__()
        d, f = c.d_model, c.d_ff
        self.max_len = c.max_len
        self.params = nn.ModuleDict(
            {
                "embed": nn.ParameterDict({"table": torch.randn(c.vocab_size, d), "places": torch.randn(c.max_len, d)}),
                "blocks": nn.ModuleDict({str(i): init_block(d, f) for i in range(c.num_layers)}),
                "norm": init_norm(d),
                "logits": init_linear(d, c.vocab_size),
            }
        )
        self.apply_fn = partial(apply, num_heads=c.num_heads, normaliser=normaliser)

    def forward(self, tokens):
        if tokens.shape[1] > self.max_len:
            raise ValueError("too long")
        return self.apply_fn(self.params, tokens)


def subject(name, normaliser):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: Model(c, normaliser),
        forward=lambda model, tokens: model(tokens),
    )


right = subject("linear attention", running)
wrong = subject("linear attention, overall", overall)

WHAT = "The normaliser of causal linear attention sums phi(k) over all keys, as the bidirectional form does, not up to the query."
CAUSE = (
    "The numerator is a cumulative sum and causal, the denominator is q_t . sum over the whole sequence: the later keys enter "
    "every earlier output through the scale it is divided by."
)
