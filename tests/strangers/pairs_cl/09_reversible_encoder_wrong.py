"""A reversible encoder (Reformer, RevNet): activations are not stored, backward rebuilds the inputs of each layer."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from veriformer.properties import Subject


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1)."""

    @staticmethod
    def forward(ctx, x1, x2, seen, f, g, *weights):
        y1 = x1 + f(x2, seen)
        y2 = x2 + g(y1)
        ctx.f, ctx.g, ctx.seen = f, g, seen
        ctx.save_for_backward(y1, y2, *weights)
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx, d1, d2):
        y1, y2, *weights = ctx.saved_tensors
        weights = [w.detach().requires_grad_() for w in weights]
        names_f = [n for n, _ in ctx.f.named_parameters()]
        names_g = [n for n, _ in ctx.g.named_parameters()]
        of_f, of_g = weights[: len(names_f)], weights[len(names_f) :]
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g = functional_call(ctx.g, dict(zip(names_g, of_g)), (y1,))
        to_y1, *grad_g = torch.autograd.grad(g, [y1, *of_g], d2)
        x2 = y2 - g.detach()
        total = d1 + to_y1
        with torch.enable_grad():
            x2 = x2.detach().requires_grad_()
            f = functional_call(ctx.f, dict(zip(names_f, of_f)), (x2, ctx.seen))
        to_x2, *grad_f = torch.autograd.grad(f, [x2, *of_f], d1)
        return total, d2 + to_x2, None, None, None, *grad_f, *grad_g


class Attend(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, seen):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if seen is not None:
            scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class Feed(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class ReversibleEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, longest):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(longest, dim)
        self.f = nn.ModuleList([Attend(dim, heads) for _ in range(layers)])
        self.g = nn.ModuleList([Feed(dim, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, seen=None):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        a, b = x, x
        for f, g in zip(self.f, self.g):
            a, b = Reversible.apply(a, b, seen, f, g, *f.parameters(), *g.parameters())
        return self.norm((a + b) / 2)


subject = Subject(
    kind="encoder",
    name="reversible encoder",
    build=lambda c: ReversibleEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "structure": "other",
        "once_differentiable": True,
    },
)

WHAT = "The gradient that goes back through f is that of y1 alone, without what comes to y1 through g (line 35): forward is right, gradients of f's weights and of x2 miss a term."
