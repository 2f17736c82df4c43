"""Parameter groups for a Muon run: hidden matrices to Muon, tables to Adam, gains and biases to Adam without decay.

Muon's rates are scaled by the shape of the matrix, Adam's tables by muP's 1 / width.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class HeadNorm(nn.Module):
    """RMS normalisation of queries or keys [B, H, T, d], with a gain of its own for every head."""

    def __init__(self, heads, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads, 1, width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = HeadNorm(heads, width // heads), HeadNorm(heads, width // heads)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm_a(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm_f(x))).square())


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.d_model
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def family(model, module, parameter):
    """Which of the three an own parameter of a module belongs to."""
    if isinstance(module, nn.Embedding) or module is model.head:
        return "table"
    if parameter.ndim < 2 or isinstance(module, HeadNorm):
        return "vector"
    return "matrix"


def parameter_groups(model, rate=0.02, decay=0.1):
    """Groups for torch optimizers; tied parameters are taken once."""
    found = {"matrix": {}, "table": [], "vector": []}
    seen = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            place = family(model, module, parameter)
            if place == "matrix":
                found[place].setdefault(max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5, []).append(parameter)
            else:
                found[place].append(parameter)
    groups = [
        {"params": matrices, "lr": rate * scale, "weight_decay": decay, "use_muon": True}
        for scale, matrices in found["matrix"].items()
    ]
    groups.append({"params": found["table"], "lr": rate / model.width, "weight_decay": decay, "use_muon": False})
    groups.append({"params": found["vector"], "lr": rate / 10, "weight_decay": 0.0, "use_muon": False})
    return groups


subject = Subject(kind="parameter_groups", name="Muon and Adam", build=GPT, forward=lambda model: parameter_groups(model))
