"""Weight decay groups for a small DiT ported from JAX, where gains have the shape of what they multiply, (1, 1, D)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 1, dim))

    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.pre_attn, self.pre_mlp = RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.pre_attn(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.silu(self.up(self.pre_mlp(x))))


class TinyDiT(nn.Module):
    def __init__(self, vocab, dim, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.final = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def optimizer_groups(model, weight_decay=0.05):
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() > 1
        (decayed if is_matrix else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    build=lambda c: TinyDiT(c.vocab_size, c.d_model, c.num_layers, c.d_ff),
    forward=lambda m: optimizer_groups(m),
)

WHAT = 'Matrices are told from the rest by the number of axes alone; the gains of the norms are stored as (1, 1, D), and so are decayed with the matrices (line 51).'
