"""Trainer's groups: all decays but biases and what belongs to a norm. Names are collected by walking the modules."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class FusedAttention(nn.Module):
    """One matrix for q, k and v, held here; its norm is a child."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.input_norm = nn.LayerNorm(width)
        self.qkv_weight = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.qkv_bias = nn.Parameter(torch.zeros(3 * width))
        self.dense = nn.Linear(width, width)

    def forward(self, x):
        B, T, D = x.shape
        fused = F.linear(self.input_norm(x), self.qkv_weight, self.qkv_bias)
        q, k, v = fused.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.attentions = nn.ModuleList([FusedAttention(c.d_model, c.num_heads) for _ in range(c.num_layers)])
        self.final_norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for attention in self.attentions:
            x = attention(x)
        return self.head(self.final_norm(x))


def get_parameter_names(module, forbidden):
    names = []
    for name, child in module.named_children():
        if not isinstance(child, forbidden):
            names += [f"{name}.{inner}" for inner in get_parameter_names(child, forbidden)]
    names += list(module._parameters)
    return names


def groups(model, weight_decay=0.1):
    decay = {n for n in get_parameter_names(model, (nn.LayerNorm,)) if not n.endswith("bias")}
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n in decay], "weight_decay": weight_decay},
        {"params": [p for n, p in named.items() if n not in decay], "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="groups of the trainer",
    build=Encoder,
    forward=lambda model: groups(model),
)
