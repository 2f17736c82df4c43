"""Reversible classifier (Reformer, RevNet): two streams, y1 = x1 + attention(x2), y2 = x2 + mlp(y1); max pooling; no positions.

Unusual: the blocks keep no activations. A hand-written backward pass first computes the inputs from the outputs and then runs
each block again with gradients; the dropout masks come back by restoring the random state. Only first derivatives. Without
positions the order of tokens does not matter. The maximum is taken over real tokens; of none it is zero.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties import Subject


class AttentionBranch(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.p = c.num_heads, c.dropout
        self.norm = nn.LayerNorm(c.d_model)
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x, real):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        s = q @ k.mT * q.size(-1) ** -0.5
        closed = ~real[:, None, None, :]
        w = s.masked_fill(closed, torch.finfo(s.dtype).min).softmax(-1).masked_fill(closed, 0)
        y = self.out((w @ v).transpose(1, 2).flatten(2))
        return F.dropout(y, self.p, self.training)


class MLPBranch(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.p = c.dropout
        self.norm = nn.LayerNorm(c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x):
        return F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class ReversibleBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f, self.g = AttentionBranch(c), MLPBranch(c)


def seeded(state, function, *inputs):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        return function(*inputs)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, real, blocks, *parameters):
        ctx.blocks, ctx.states, ctx.parameters = blocks, [], parameters
        with torch.no_grad():
            for block in blocks:
                before_f = torch.get_rng_state()
                x1 = x1 + block.f(x2, real)
                before_g = torch.get_rng_state()
                x2 = x2 + block.g(x1)
                ctx.states.append((before_f, before_g))
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(x1, x2, real)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx, d1, d2):
        y1, y2, real = ctx.saved_tensors
        collected = {id(p): None for p in ctx.parameters}

        def collect(block, grads):
            for p, g in zip(block.parameters(), grads):
                if g is not None:
                    collected[id(p)] = g if collected[id(p)] is None else collected[id(p)] + g

        def redo(state, module, x, *rest):
            with torch.enable_grad(), torch.autocast("cpu", enabled=ctx.autocast[0], dtype=ctx.autocast[1]):
                x = x.detach().requires_grad_()
                return x, seeded(state, module, x, *rest)

        def pull(module, x, y, grad):
            wanted = [p for p in module.parameters() if p.requires_grad]
            grads = torch.autograd.grad(y, [x, *wanted], grad.to(y.dtype), allow_unused=True)
            if len(wanted) == len(list(module.parameters())):
                collect(module, grads[1:])
            else:
                for p, g in zip(wanted, grads[1:]):
                    collected[id(p)] = g
            return grads[0]

        for block, (before_f, before_g) in zip(reversed(ctx.blocks), reversed(ctx.states)):
            z, gz = redo(before_g, block.g, y1)
            y2 = y2 - gz.detach()
            d1 = d1 + pull(block.g, z, gz, d2)
            z, fz = redo(before_f, block.f, y2, real)
            y1 = y1 - fz.detach()
            d2 = d2 + pull(block.f, z, fz, d1)
        return d1, d2, None, None, *(collected[id(p)] for p in ctx.parameters)


class ReversibleClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(ReversibleBlock(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.embedding(tokens)
        y1, y2 = _Reversible.apply(x, x, real, list(self.blocks), *self.blocks.parameters())
        x = self.norm(0.5 * (y1 + y2))
        top = x.masked_fill(~real.unsqueeze(-1), float("-inf")).amax(dim=1)
        top = torch.where(real.any(dim=1, keepdim=True), top, torch.zeros_like(top))
        return self.head(top)


COMMON = dict(
    kind="classifier",
    build=ReversibleClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "pooling": "max",
        "positions": "none",
        "padding_side": "both",
        "once_differentiable": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": True,
        "structure": "other",
    },
)
