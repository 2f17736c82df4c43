"""A reversible encoder (RevNet, Reformer): activations are not kept, the backward computes them anew from the outputs."""
import math

import torch
from torch import nn
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from veriformer.properties import Subject


class Attend(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.num_heads)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class ReversibleBlock(Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1)."""

    @staticmethod
    def forward(ctx, f, g, mask, x1, x2, *parameters):
        y1 = x1 + f(x2, mask)
        y2 = x2 + g(y1)
        ctx.f, ctx.g, ctx.mask = f, g, mask
        ctx.save_for_backward(y1, y2, *parameters)
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx, dy1, dy2):
        y1, y2, *parameters = ctx.saved_tensors
        names_f = [name for name, _ in ctx.f.named_parameters()]
        names_g = [name for name, _ in ctx.g.named_parameters()]
        leaves = [p.detach().requires_grad_() for p in parameters]
        leaves_f, leaves_g = leaves[: len(names_f)], leaves[len(names_f) :]
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy1 = functional_call(ctx.g, dict(zip(names_g, leaves_g)), (y1,))
            through_g, *grads_g = grad(gy1, [y1, *leaves_g], dy2)
        dx1 = dy1 + through_g
        with torch.enable_grad():
            x2 = (y2 - gy1).detach().requires_grad_()
            fx2 = functional_call(ctx.f, dict(zip(names_f, leaves_f)), (x2, ctx.mask))
            through_f, *grads_f = grad(fx2, [x2, *leaves_f], dx1)
        dx2 = dy2 + through_f
        return None, None, None, dx1, dx2, *grads_f, *grads_g


class ReversibleEncoder(nn.Module):
    def __init__(self, vocab_size, max_len, d_model, num_heads, num_layers, d_ff):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(max_len, d_model)
        self.f = nn.ModuleList(Attend(d_model, num_heads) for _ in range(num_layers))
        self.g = nn.ModuleList(FeedForward(d_model, d_ff) for _ in range(num_layers))
        self.norm = nn.LayerNorm(2 * d_model)
        self.out = nn.Linear(2 * d_model, d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        y1, y2 = x, x
        for f, g in zip(self.f, self.g):
            y1, y2 = ReversibleBlock.apply(f, g, attention_mask, y1, y2, *f.parameters(), *g.parameters())
        return self.out(self.norm(torch.cat([y1, y2], dim=-1)))


subject = Subject(
    kind="encoder",
    name="reversible encoder",
    build=lambda c: ReversibleEncoder(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "padding_side": "right", "norm": "layer", "activation": "gelu",
        "once_differentiable": True, "structure": "other",
    },
)
