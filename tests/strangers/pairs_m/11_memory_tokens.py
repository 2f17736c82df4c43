"""zoo/PR 204: learned memory tokens in front of a causal decoder ("registers"), so that heads have somewhere to look
at the first step. The memory is cut off again before the vocabulary."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "After the layers the first T rows are kept, which starts with the memory tokens, not the last T."
CAUSE = (
    "The memory tokens stand in front, but the cut keeps `[:, :T]`: outputs are those of the memory tokens and then of "
    "tokens four places earlier, so output t does not depend on input t, and the last four inputs reach nothing."
)
MEMORY = 4


def attention(x, qkv, out, heads, visible):
    b, n, d = x.shape
    q, k, v = qkv(x).reshape(b, n, heads, 3, d // heads).permute(3, 0, 2, 1, 4)
    scores = (q * (d // heads) ** -0.5) @ k.transpose(-1, -2)
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return out((weights @ v).permute(0, 2, 1, 3).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d))

    def forward(self, x, visible):
        x = x + attention(self.ln1(x), self.qkv, self.out, self.heads, visible)
        return x + self.mlp(self.ln2(x))


class RegisterGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(MEMORY, c.d_model))
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def strip(self, x, length):
        return x[:, MEMORY:]

    def forward(self, ids, attention_mask=None):
        batch, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        x = torch.cat([self.memory.expand(batch, -1, -1), x], dim=1)
        total = length + MEMORY
        visible = torch.ones(total, total, dtype=torch.bool, device=ids.device).tril()[None, None]
        if attention_mask is not None:
            ours = attention_mask.new_ones(batch, MEMORY)
            visible = visible & torch.cat([ours, attention_mask], dim=1)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, visible)
        return self.head(self.norm(self.strip(x, length)))


class RegisterGPTFront(RegisterGPT):
    def strip(self, x, length):
        return x[:, :length]


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=cls,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "extra_tokens": MEMORY, "positions": "learned", "padding_side": "right", "norm_placement": "pre",
            "activation": "gelu",
        },
    )  # fmt: skip


right, wrong = subject(RegisterGPT), subject(RegisterGPTFront)
