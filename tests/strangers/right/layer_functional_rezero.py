"""Encoder layer in functional style: one nn.ParameterDict, pure functions over it; ReZero (x + alpha * f(x)), no norms.

Unusual: there is no normalization at all, and the residual branches are multiplied by one learned number each. ReZero starts
with 0; here it starts with 0.5, so that a fresh layer does something. Names of parameters are strings with underscores.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def init_params(d_model, d_ff):
    def matrix(n_out, n_in):
        return nn.Parameter(torch.empty(n_out, n_in).uniform_(-1, 1) * math.sqrt(3.0 / n_in))

    return nn.ParameterDict(
        {
            "attn_q_w": matrix(d_model, d_model), "attn_q_b": nn.Parameter(torch.zeros(d_model)),
            "attn_k_w": matrix(d_model, d_model), "attn_k_b": nn.Parameter(torch.zeros(d_model)),
            "attn_v_w": matrix(d_model, d_model), "attn_v_b": nn.Parameter(torch.zeros(d_model)),
            "attn_o_w": matrix(d_model, d_model), "attn_o_b": nn.Parameter(torch.zeros(d_model)),
            "attn_alpha": nn.Parameter(torch.tensor(0.5)),
            "mlp_in_w": matrix(d_ff, d_model), "mlp_in_b": nn.Parameter(torch.zeros(d_ff)),
            "mlp_out_w": matrix(d_model, d_ff), "mlp_out_b": nn.Parameter(torch.zeros(d_model)),
            "mlp_alpha": nn.Parameter(torch.tensor(0.5)),
        }
    )  # fmt: skip


def linear(params, name, x):
    return F.linear(x, params[name + "_w"], params[name + "_b"])


def attend(params, x, key_is_real, heads):
    def split(y):
        return y.reshape(y.shape[0], y.shape[1], heads, -1).permute(0, 2, 1, 3)

    q, k, v = (split(linear(params, "attn_" + n, x)) for n in "qkv")
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if key_is_real is None:
        probs = F.softmax(logits, -1)
    else:
        keep = key_is_real[:, None, None, :]
        probs = F.softmax(torch.where(keep, logits, torch.finfo(logits.dtype).min), -1)
        probs = torch.where(keep, probs, torch.zeros((), dtype=probs.dtype, device=probs.device))
    return linear(params, "attn_o", (probs @ v).permute(0, 2, 1, 3).reshape(x.shape))


def mlp(params, x):
    return linear(params, "mlp_out", F.relu(linear(params, "mlp_in", x)))


def layer(params, x, key_is_real, *, heads, dropout, training):
    x = x + params["attn_alpha"] * F.dropout(attend(params, x, key_is_real, heads), dropout, training)
    return x + params["mlp_alpha"] * F.dropout(mlp(params, x), dropout, training)


class Layer(nn.Module):
    """Holds the parameters and the settings; all that is computed is computed by the functions above."""

    def __init__(self, c):
        super().__init__()
        self.params = init_params(c.d_model, c.d_ff)
        self.settings = {"heads": c.num_heads, "dropout": c.dropout}

    def forward(self, x, attention_mask=None):
        return layer(self.params, x, attention_mask, training=self.training, **self.settings)


def projections(m):
    views = {n: m.params[f"attn_{n}_w"] for n in "qkvo"}
    views.update({f"{n}_bias": m.params[f"attn_{n}_b"] for n in "qkvo"})
    return views


COMMON = dict(
    kind="layer",
    build=Layer,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    projections=projections,
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "none",
        "padding_side": "both",
        "norm": "none",
        "residual": True,
        "activation": "relu",
        "bias": True,
        "structure": "other",
    },
)
