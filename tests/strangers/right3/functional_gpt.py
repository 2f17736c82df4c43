"""A decoder of pure functions over a ParameterDict, parallel attention and MLP, no bias, sinusoids."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

def ln(x, g):
    return F.layer_norm(x, x.shape[-1:], g)

def attend(x, w_in, w_out, heads):
    B, T, D = x.shape
    q, k, v = (x @ w_in).reshape(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(B, T, D) @ w_out

def table(T, d, x):
    pos = torch.arange(T, dtype=x.dtype, device=x.device)[:, None]
    ang = pos / 10000 ** (torch.arange(0, d, 2, dtype=x.dtype, device=x.device) / d)
    return torch.stack([ang.sin(), ang.cos()], -1).flatten(1)

def apply(p, tokens):
    x = p["wte"][tokens]
    x = x + table(x.shape[1], x.shape[2], x)
    for i in range(p.layers):
        y = ln(x, p[f"g{i}"])
        x = x + attend(y, p[f"in{i}"], p[f"out{i}"], p.heads) + F.gelu(y @ p[f"up{i}"], approximate="tanh") @ p[f"down{i}"]
    return ln(x, p["g"]) @ p["head"]

def init(c):
    r = lambda *s: nn.Parameter(torch.randn(*s) * s[0] ** -0.5)
    d, p = c.d_model, nn.ParameterDict()
    p["wte"], p["g"], p["head"] = nn.Parameter(torch.randn(c.vocab_size, d)), nn.Parameter(torch.ones(d)), r(d, c.vocab_size)
    for i in range(c.num_layers):
        p[f"g{i}"], p[f"in{i}"], p[f"out{i}"] = nn.Parameter(torch.ones(d)), r(d, 3 * d), r(d, d)
        p[f"up{i}"], p[f"down{i}"] = r(d, c.d_ff), r(c.d_ff, d)
    p.heads, p.layers = c.num_heads, c.num_layers
    return p

common = dict(kind="decoder", build=init, forward=lambda p, tokens: apply(p, tokens), domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]})
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_bias": False, "norm_placement": "pre",
    "activation": "gelu_tanh", "bias": False, "final_norm": True, "tied": False})
