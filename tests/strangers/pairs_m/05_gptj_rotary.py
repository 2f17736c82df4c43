"""zoo/PR 157: GPT-J in pure functions. Parameters are one flat dict of arrays, the model is `apply(params, ids)`;
attention and feed-forward network run in parallel behind one norm."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Sines and cosines are tiled as [f, f] (halves) while the rotation pairs neighbouring channels."
CAUSE = (
    "Layout mismatch of rotary embeddings: the table repeats the frequencies end to end, but rotate_every_two turns "
    "channels 2i and 2i+1, whose entries in the table then belong to two different frequencies; it is no rotation, and "
    "q.k no longer depends on the distance alone."
)


def table_interleaved(length, width, like):
    return _angles(length, width, like).repeat_interleave(2, dim=-1)


def table_halves(length, width, like):
    angles = _angles(length, width, like)
    return torch.cat([angles, angles], dim=-1)


def _angles(length, width, like):
    inv_freq = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    return torch.outer(torch.arange(length, dtype=torch.float64, device=like.device), inv_freq)


def rotate_every_two(x):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([-odd, even], dim=-1).flatten(-2)


def rope(x, table):
    """x `[B, T, H, K]`."""
    angles = table(x.shape[1], x.shape[-1], x)[:, None, :]
    return x * angles.cos().to(x.dtype) + rotate_every_two(x) * angles.sin().to(x.dtype)


def layer_norm(p, name, x):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * p[name + "_g"] + p[name + "_b"]


def block(p, n, x, heads, table):
    b, t, d = x.shape
    h = layer_norm(p, f"ln{n}", x)
    q, k, v = ((h @ p[f"{w}{n}"]).reshape(b, t, heads, d // heads) for w in ("wq", "wk", "wv"))
    q, k = rope(q, table), rope(k, table)
    logits = torch.einsum("bthk,bshk->bhts", q, k) / (d // heads) ** 0.5
    visible = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
    weights = torch.softmax(torch.where(visible, logits, -torch.inf), -1)
    attended = torch.einsum("bhts,bshk->bthk", weights, v).reshape(b, t, d) @ p[f"wo{n}"]
    hidden = nn.functional.gelu(h @ p[f"fi{n}"] + p[f"fi{n}_b"], approximate="tanh")
    return x + attended + hidden @ p[f"fo{n}"] + p[f"fo{n}_b"]


def apply(p, ids, depth, heads, table):
    x = p["embed"][ids]
    for n in range(depth):
        x = block(p, n, x, heads, table)
    return layer_norm(p, "ln_f", x) @ p["head"] + p["head_b"]


class GPTJ(nn.Module):
    """A box for the dict, so that optimisers find it."""

    def __init__(self, vocab, d, heads, d_ff, depth, table):
        super().__init__()
        if (d // heads) % 2:
            raise ValueError("heads of an odd width cannot be rotated")
        self.depth, self.heads, self.table = depth, heads, table
        shapes = {"embed": (vocab, d), "head": (d, vocab), "head_b": (vocab,), "ln_f_g": (d,), "ln_f_b": (d,)}
        for n in range(depth):
            shapes |= {f"{w}{n}": (d, d) for w in ("wq", "wk", "wv", "wo")}
            shapes |= {f"fi{n}": (d, d_ff), f"fi{n}_b": (d_ff,), f"fo{n}": (d_ff, d), f"fo{n}_b": (d,)}
            shapes |= {f"ln{n}_g": (d,), f"ln{n}_b": (d,)}
        self.p = nn.ParameterDict({name: self._start(name, shape) for name, shape in shapes.items()})

    @staticmethod
    def _start(name, shape):
        if len(shape) == 1:
            return nn.Parameter(torch.ones(shape) if name.endswith("_g") else torch.zeros(shape))
        return nn.Parameter(torch.randn(shape) * (1.0 if name == "embed" else shape[0] ** -0.5))

    def forward(self, ids):
        return apply(self.p, ids, self.depth, self.heads, self.table)


def subject(name, table):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: GPTJ(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, table),
        forward=lambda m, tokens: m(tokens),
        declares={"positions": "rotary", "layout": "interleaved", "base": 10000, "activation": "gelu_tanh",
                  "norm": "layer", "final_norm": True},
    )  # fmt: skip


right = subject("GPT-J", table_interleaved)
wrong = subject("GPT-J, tiled table", table_halves)
