WHAT = "DropoutAdd.backward makes its mask again from the seed that the shared generator holds when the backward runs (ctx.rng.seed), not from the one of its own forward: the attention branch's gradient is masked with the mask of the feed-forward branch (line 35)."
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class SeedStream:
    """Dropout masks are not stored: a seed is, from which they are made again."""

    seed = 0

    def advance(self):
        self.seed = int(torch.randint(2**31 - 1, ()))
        return self.seed


def keep_mask(seed, like, p):
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(like.shape, generator=gen) >= p).to(like)


class DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, p, rng):
        ctx.p, ctx.rng = p, rng
        ctx.seed = rng.advance()
        return residual + x * keep_mask(ctx.seed, x, p) / (1 - p)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        keep = keep_mask(ctx.rng.seed, grad, ctx.p)
        return grad * keep / (1 - ctx.p), grad, None, None


class Layer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout):
        super().__init__()
        self.num_heads, self.p = num_heads, dropout
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.linear1 = nn.Linear(d_model, d_ff)
        self.linear2 = nn.Linear(d_ff, d_model)
        self.rng = SeedStream()

    def add(self, x, residual):
        if not self.training or self.p == 0:
            return residual + x
        return DropoutAdd.apply(x, residual, self.p, self.rng)

    def attention(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (d // self.num_heads) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask=None):
        x = self.add(self.attention(self.norm1(x), mask), x)
        return self.add(self.linear2(F.relu(self.linear1(self.norm2(x)))), x)


subject = Subject(
    kind="layer",
    name="pre-norm layer with seeded dropout",
    build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
        "residual": True,
        "once_differentiable": True,
    },
)
