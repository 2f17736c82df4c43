"""An ESM-like encoder in einsum: parameters in a dict, rotary positions, no module but the one that holds them."""

import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate(x, theta=10000.0):
    """Rotate [b, t, h, k] by position, channels i and i + k/2 as one pair."""
    t, k = x.shape[1], x.shape[-1]
    freq = theta ** (-torch.arange(0, k, 2, dtype=torch.float64, device=x.device) / k)
    angle = torch.outer(torch.arange(t, dtype=torch.float64, device=x.device), freq)
    cos, sin = angle.cos().to(x.dtype)[None, :, None, :], angle.sin().to(x.dtype)[None, :, None, :]
    a, b = x[..., : k // 2], x[..., k // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def layer_norm(x, gain, shift):
    return F.layer_norm(x, x.shape[-1:], gain, shift, 1e-5)


def self_attention(p, x, mask):
    q = einsum("btd,dhk->bthk", x, p["wq"]) + p["bq"]
    k = einsum("btd,dhk->bthk", x, p["wk"]) + p["bk"]
    v = einsum("btd,dhk->bthk", x, p["wv"]) + p["bv"]
    scores = einsum("bthk,bshk->bhts", rotate(q), rotate(k)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
    mixed = einsum("bhts,bshk->bhtk", scores.softmax(-1), v)
    return mixed.reshape(x.shape) @ p["wo"] + p["bo"]


def feed_forward(p, x):
    return F.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def block(p, x, mask):
    x = x + self_attention(p, layer_norm(x, p["g1"], p["s1"]), mask)
    return x + feed_forward(p, layer_norm(x, p["g2"], p["s2"]))


def weight(*shape, fan_in):
    return nn.Parameter(torch.randn(*shape) / fan_in**0.5)


def zeros(*shape):
    return nn.Parameter(torch.zeros(*shape))


def block_parameters(d, h, f):
    k = d // h
    return nn.ParameterDict(
        {
            "wq": weight(d, h, k, fan_in=d), "bq": zeros(h, k),
            "wk": weight(d, h, k, fan_in=d), "bk": zeros(h, k),
            "wv": weight(d, h, k, fan_in=d), "bv": zeros(h, k),
            "wo": weight(d, d, fan_in=d), "bo": zeros(d),
            "w1": weight(d, f, fan_in=d), "b1": zeros(f),
            "w2": weight(f, d, fan_in=f), "b2": zeros(d),
            "g1": nn.Parameter(torch.ones(d)), "s1": zeros(d),
            "g2": nn.Parameter(torch.ones(d)), "s2": zeros(d),
        }
    )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, f, depth):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, d))
        self.blocks = nn.ModuleList([block_parameters(d, h, f) for _ in range(depth)])
        self.gain, self.shift = nn.Parameter(torch.ones(d)), zeros(d)

    def forward(self, tokens, mask=None):
        x = F.embedding(tokens, self.table)
        mask = None if mask is None else mask.bool()
        for p in self.blocks:
            x = block(p, x, mask)
        return layer_norm(x, self.gain, self.shift)


subject = Subject(
    kind="encoder",
    name="einsum encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000.0,
        "beyond_max_len": "works",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "other",
        "embedding_scale": False,
        "shared_layers": False,
        "structure": "textbook",
        "memory": "quadratic",
    },
)
