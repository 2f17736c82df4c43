"""Encoder with DeepNorm (residuals times alpha behind which the norm stands), stochastic depth and gradient checkpointing.

Unusual: while gradients are wanted in training the layers are recomputed in the backward pass. Stochastic depth drops a
branch for whole samples and divides what it keeps by the share kept; its rate rises with depth to the drawn dropout.
Rotary positions by complex multiplication, in the wider of float32 and the input's dtype.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


def drop_path(branch: Tensor, rate: float, training: bool) -> Tensor:
    if rate == 0.0 or not training:
        return branch
    if rate >= 1.0:
        return branch * 0.0
    keep = torch.rand(branch.size(0), 1, 1, device=branch.device) >= rate
    return branch * keep / (1.0 - rate)


def turn(x: Tensor) -> Tensor:  # [b, t, h, d]
    wide = x if x.dtype == torch.float64 else x.float()
    rate = torch.logspace(0, -1 + 2 / x.size(-1), x.size(-1) // 2, base=10000.0, dtype=torch.float64, device=x.device)
    angle = torch.arange(x.size(1), dtype=torch.float64, device=x.device)[:, None, None] * rate
    turned = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angle), angle).to(
        torch.complex128 if wide.dtype == torch.float64 else torch.complex64
    )
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, alpha: float, beta: float, rate: float):
        super().__init__()
        self.heads, self.alpha, self.rate = heads, alpha, rate
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        for linear in (self.query, self.key):
            nn.init.xavier_normal_(linear.weight, gain=1.0)
        for linear in (self.value, self.out, self.up, self.down):
            nn.init.xavier_normal_(linear.weight, gain=beta)

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        q, k, v = turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        branch = drop_path(self.attention(x, mask), self.rate, self.training)
        x = self.attention_norm(x * self.alpha + branch)
        branch = drop_path(self.down(F.gelu(self.up(x))), self.rate, self.training)
        return self.feed_forward_norm(x * self.alpha + branch)


class DeepEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        n = c.num_layers
        alpha, beta = (2 * n) ** 0.25, (8 * n) ** -0.25  # encoder-only column of the DeepNet paper
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            Layer(c.d_model, c.num_heads, c.d_ff, alpha, beta, c.dropout * (i + 1) / n) for i in range(n)
        )

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        # a sample without any real token attends to all of it, so that nothing is undefined
        attention_mask = attention_mask | ~attention_mask.any(dim=1, keepdim=True)
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, attention_mask, use_reentrant=False)
            else:
                x = layer(x, attention_mask)
        return x


COMMON = dict(
    kind="encoder",
    build=DeepEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "interleaved",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "bias": True,
        "drop_path_scaled": True,
        "structure": "other",
    },
)
