"""Bidirectional self-attention whose weights are parametrized: weight norm for q and k, spectral norm for v, tied scale for o.

Unusual: weight norm is torch.nn.utils.parametrizations.weight_norm; the spectral norm is exact (the largest singular value
from an SVD), so that, unlike power iteration, it keeps no state and is the same in training and evaluation. The output matrix
is skew-symmetric plus its diagonal by a parametrization.
"""

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from veriformer.properties import Subject


class ExactSpectral(nn.Module):
    def forward(self, weight):
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return (wide / torch.linalg.matrix_norm(wide, ord=2).clamp_min(1e-6)).to(weight.dtype)


class SkewPlusDiagonal(nn.Module):
    def forward(self, weight):
        upper = weight.triu(1)
        return upper - upper.mT + torch.diag(weight.diagonal())


class ParametrizedAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.query = weight_norm(nn.Linear(d_model, d_model))
        self.key = weight_norm(nn.Linear(d_model, d_model))
        self.value = nn.Linear(d_model, d_model)
        parametrize.register_parametrization(self.value, "weight", ExactSpectral())
        self.out = nn.Linear(d_model, d_model)
        parametrize.register_parametrization(self.out, "weight", SkewPlusDiagonal())
        self.dropout = dropout

    def forward(self, x, attention_mask=None):
        b, t, c = x.shape
        with parametrize.cached():
            q = self.query(x).view(b, t, self.num_heads, -1).movedim(2, 1)
            k = self.key(x).view(b, t, self.num_heads, -1).movedim(2, 1)
            v = self.value(x).view(b, t, self.num_heads, -1).movedim(2, 1)
            # for a sample without any real token torch's kernels give zeros
            mask = None if attention_mask is None else attention_mask[:, None, None, :].expand(b, 1, t, t)
            p = self.dropout if self.training else 0.0
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
            return self.out(y.movedim(1, 2).reshape(b, t, c))


COMMON = dict(
    kind="self_attention",
    build=lambda c: ParametrizedAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"causal": False, "positions": "none", "padding_side": "both", "bias": True, "empty_row": "zeros"},
)
