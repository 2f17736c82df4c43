"""An encoder in the manner of JAX: a tree of parameters, keys that are split, pure functions."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def split(key, n):
    return torch.randint(2**62, (n,), generator=torch.Generator().manual_seed(key)).tolist()


def glorot(key, fan_in, fan_out):
    limit = math.sqrt(6 / (fan_in + fan_out))
    return (2 * torch.rand(fan_in, fan_out, generator=torch.Generator().manual_seed(key)) - 1) * limit


def init_layer(key, d, f):
    k_q, k_k, k_v, k_o, k_1, k_2 = split(key, 6)
    return {
        "ln1_scale": torch.ones(d),
        "ln1_bias": torch.zeros(d),
        "wq": glorot(k_q, d, d),
        "wk": glorot(k_k, d, d),
        "wv": glorot(k_v, d, d),
        "wo": glorot(k_o, d, d),
        "ln2_scale": torch.ones(d),
        "ln2_bias": torch.zeros(d),
        "w1": glorot(k_1, d, f),
        "b1": torch.zeros(f),
        "w2": glorot(k_2, f, d),
        "b2": torch.zeros(d),
    }


def init(key, vocab, d, f, layers):
    k_embed, k_head, *k_layers = split(key, 2 + layers)
    return {
        "embed": glorot(k_embed, vocab, d),
        "layers": [init_layer(k, d, f) for k in k_layers],
        "ln_scale": torch.ones(d),
        "ln_bias": torch.zeros(d),
        "head": glorot(k_head, d, vocab),
    }


def layer_norm(x, scale, bias, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + eps) * scale + bias


def attend(p, x, mask, heads):
    b, t, d = x.shape
    q, k, v = (torch.einsum("btd,de->bte", x, p[w]).reshape(b, t, heads, d // heads) for w in ("wq", "wk", "wv"))
    logits = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(d // heads)
    if mask is not None:
        logits = torch.where(mask[:, None, None, :], logits, torch.finfo(logits.dtype).min)
    mixed = torch.einsum("bhts,bshk->bthk", torch.softmax(logits, -1), v)
    return mixed.reshape(b, t, d) @ p["wo"]


def feed_forward(p, x):
    return F.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def sinusoids(t, d, like):
    pos = torch.arange(t, dtype=torch.float64, device=like.device)[:, None]
    i = torch.arange(d, device=like.device)
    angle = pos / 10000 ** ((2 * (i // 2)) / d)
    return torch.where(i % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)


def apply(params, tokens, mask, heads):
    x = params["embed"][tokens] * math.sqrt(params["embed"].shape[1])
    x = x + sinusoids(*x.shape[1:], x)
    for p in params["layers"]:
        x = x + attend(p, layer_norm(x, p["ln1_scale"], p["ln1_bias"]), mask, heads)
        x = x + feed_forward(p, layer_norm(x, p["ln2_scale"], p["ln2_bias"]))
    return layer_norm(x, params["ln_scale"], params["ln_bias"]) @ params["head"]


class Tree(nn.Module):
    """Holds the parameters; all that is computed is `apply`."""

    def __init__(self, params, heads):
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.ParameterDict(p) for p in params.pop("layers"))
        self.outer = nn.ParameterDict(params)

    def forward(self, tokens, mask=None):
        params = {**dict(self.outer.items()), "layers": [dict(p.items()) for p in self.layers]}
        return apply(params, tokens, mask, self.heads)


def build(c):
    key = int(torch.randint(2**62, ()))
    return Tree(init(key, c.vocab_size, c.d_model, c.d_ff, c.num_layers), c.num_heads)


subject = Subject(
    kind="encoder",
    name="pure functions",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "init": "xavier",
        "tied": False,
        "padding_side": "right",
    },
)
