"""Linear attention (Katharopoulos et al. 2020), as pure functions of a dict of arrays, the way one writes it in JAX."""

from functools import partial

import torch
from torch import nn

from veriformer.properties import Subject


def init_dense(fan_in, fan_out):
    return nn.ParameterDict({"w": torch.randn(fan_in, fan_out) * fan_in**-0.5, "b": torch.zeros(fan_out)})


def init_norm(width):
    return nn.ParameterDict({"scale": torch.ones(width), "offset": torch.zeros(width)})


def dense(p, x):
    return x @ p["w"] + p["b"]


def layer_norm(p, x):
    return nn.functional.layer_norm(x, x.shape[-1:], p["scale"], p["offset"])


def phi(x):
    return nn.functional.elu(x) + 1.0


def keys_after(k, mask):
    return phi(k) * mask


def keys_before(k, mask):
    return phi(k * mask)


def linear_attention(p, x, mask, heads, features):
    split = lambda y: y.unflatten(-1, (heads, -1))  # [B, T, H, K]
    q, k, v = phi(split(dense(p["q"], x))), split(dense(p["k"], x)), split(dense(p["v"], x))
    k = features(k, mask[:, :, None, None])
    kv = torch.einsum("bshk,bshe->bhke", k, v)
    norm = torch.einsum("bthk,bhk->bth", q, k.sum(1)).clamp(min=1e-4)
    return dense(p["o"], (torch.einsum("bthk,bhke->bthe", q, kv) / norm[..., None]).flatten(2))


def block(p, x, mask, heads, features):
    x = x + linear_attention(p["attention"], layer_norm(p["norm_1"], x), mask, heads, features)
    hidden = nn.functional.gelu(dense(p["up"], layer_norm(p["norm_2"], x)))
    return x + dense(p["down"], hidden)


def sinusoid(length, width, device):
    rate = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angle = torch.arange(length, device=device)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width]


class LinearTransformer(nn.Module):
    def __init__(self, c, features):
        super().__init__()
        d = c.d_model
        self.apply_block = partial(block, heads=c.num_heads, features=features)
        self.table = nn.Parameter(torch.randn(c.vocab_size, d))
        self.params = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.ModuleDict({name: init_dense(d, d) for name in "qkvo"}),
                    "norm_1": init_norm(d),
                    "norm_2": init_norm(d),
                    "up": init_dense(d, c.d_ff),
                    "down": init_dense(c.d_ff, d),
                }
            )
            for _ in range(c.num_layers)
        )
        self.final = init_norm(d)

    def forward(self, tokens, mask=None):
        x = self.table[tokens]
        x = x + sinusoid(tokens.shape[1], x.shape[-1], x.device).to(x.dtype)
        mask = (torch.ones_like(tokens) if mask is None else mask).to(x.dtype)
        for p in self.params:
            x = self.apply_block(p, x, mask)
        return layer_norm(self.final, x)


def subject(features):
    return Subject(
        kind="encoder",
        name="linear attention",
        build=lambda c: LinearTransformer(c, features),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "sinusoidal", "padding_side": "right", "norm_placement": "pre"},
    )


right, wrong = subject(keys_after), subject(keys_before)
WHAT = "Padded keys are set to zero before the feature map elu(x) + 1 instead of after it."
CAUSE = (
    "phi(0) is 1 and not 0, so a masked key keeps a feature vector of ones: its value enters the sum over keys and its feature the "
    "normaliser, and padding changes the outputs at real positions in every layer's linear attention."
)
