"""A GPT after the clean-up of its initialisation: one function over named parameters, no isinstance any more."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down_proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2, self.mlp = nn.LayerNorm(width), MLP(width, hidden)

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


@torch.no_grad()
def init_gpt2(model, num_layers, std=0.02):
    """The scheme of GPT-2: N(0, 0.02), what is added to the stream smaller by sqrt(2 * layers), biases 0."""
    for name, p in model.named_parameters():
        if "norm" in name:
            continue
        if name.endswith("bias"):
            p.zero_()
        elif name.endswith(("out_proj.weight", "down_proj.weight")):
            p.normal_(0.0, std / math.sqrt(2 * num_layers))
        else:
            p.normal_(0.0, std)


class GPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        init_gpt2(self, layers)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm_f(x))


subject = Subject(
    kind="decoder",
    name="GPT with GPT-2's initial weights",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens: model(tokens),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu_tanh",
        "tied": True,
        "init": "gpt2",
        "max_len": 32,
    },
)
