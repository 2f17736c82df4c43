# A frozen decoder with LoRA on queries and values; only the adapters are trained.
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class LoraQKV(nn.Module):
    """A fused projection to q, k, v whose q and v have adapters of low rank."""

    def __init__(self, width, rank, alpha=4.0):
        super().__init__()
        self.base = nn.Linear(width, 3 * width)
        self.q_down, self.q_up = nn.Parameter(torch.empty(rank, width)), nn.Parameter(torch.empty(width, rank))
        self.v_down, self.v_up = nn.Parameter(torch.empty(rank, width)), nn.Parameter(torch.empty(width, rank))
        self.scaling = alpha / rank
        self.reset_lora()

    def reset_lora(self):
        nn.init.kaiming_uniform_(self.q_down, a=math.sqrt(5))
        nn.init.kaiming_uniform_(self.v_down, a=math.sqrt(5))
        nn.init.zeros_(self.q_up)
        nn.init.zeros_(self.v_up)

    def forward(self, x):
        q, k, v = self.base(x).chunk(3, dim=-1)
        q = q + F.linear(F.linear(x, self.q_down), self.q_up) * self.scaling
        v = v + F.linear(F.linear(x, self.v_down), self.v_up) * self.scaling
        return q, k, v


class Block(nn.Module):
    def __init__(self, width, heads, hidden, rank):
        super().__init__()
        self.heads = heads
        self.input_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = LoraQKV(width, rank), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.input_norm(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class LoraGPT(nn.Module):
    def __init__(self, c, rank=2):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff, rank) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith(("_down", "_up")))

    def forward(self, tokens):
        place = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(place))))


subject = Subject(
    kind="decoder",
    name="GPT with LoRA",
    build=LoraGPT,
    forward=lambda model, tokens: model(tokens),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "tied": False,
        "frozen": True,
    },
)
