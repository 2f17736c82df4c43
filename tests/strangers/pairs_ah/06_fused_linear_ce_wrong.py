WHAT = "The gradient of the output weights is overwritten by each chunk of tokens instead of summed: only the last chunk's share arrives, though the loss itself is right (line 31: `grad_weight = g.t() @ h`)."
"""A tied GPT whose loss never makes all logits at once (as Liger does: gradients are made in the forward pass, by chunks)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CHUNK = 4  # tokens
IGNORE = -100


class FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target):
        counted = target != IGNORE
        n = counted.sum().clamp(min=1)
        loss = hidden.new_zeros(())
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for lo in range(0, hidden.shape[0], CHUNK):
            rows = slice(lo, lo + CHUNK)
            h, live = hidden[rows], counted[rows]
            t = target[rows].masked_fill(~live, 0)
            logp = (h @ weight.t()).log_softmax(-1)
            picked = logp.gather(1, t[:, None]).squeeze(1)
            loss = loss - (picked * live).sum() / n
            g = (logp.exp() - F.one_hot(t, weight.shape[0])) * (live[:, None] / n.to(h.dtype))
            grad_hidden[rows] = g @ weight
            grad_weight = g.t() @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.n1, self.n2, self.h = nn.LayerNorm(d), nn.LayerNorm(d), h
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.n2(x))))


class TiedGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)

    def hidden(self, tokens):
        return self.norm(self.blocks(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]))

    def forward(self, tokens):
        return F.linear(self.hidden(tokens), self.wte.weight)

    def loss(self, tokens, labels):
        return FusedLinearCrossEntropy.apply(self.hidden(tokens).flatten(0, 1), self.wte.weight, labels.flatten())


subject = Subject(
    kind="decoder",
    name="tied GPT, fused loss",
    build=TiedGPT,
    forward=lambda m, tokens: m(tokens),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "tied": True,
              "output_bias": False, "empty_loss": "zero", "once_differentiable": True},
)
