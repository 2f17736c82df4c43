"""A decoder with a second prediction module: it joins the trunk's state of one step ago with the token that came.

Row t of the second half of the outputs is what the module says of token t + 1, given h_(t-1) and the embedding of
token t; in training this is the depth-2 prediction, in decoding it drafts.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class CausalBlock(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, inner)
        self.fc_out = nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc(self.ln2(x))))


class Predictor(nn.Module):
    """What DeepSeek-V3 calls an MTP module."""

    def __init__(self, width, heads, inner):
        super().__init__()
        self.norm_state, self.norm_token = nn.LayerNorm(width), nn.LayerNorm(width)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.block = CausalBlock(width, heads, inner)

    def forward(self, states, embedded):
        """States of the trunk [B, T, D], moved on by one step; the first token has none before it."""
        before = F.pad(states, (0, 0, 1, 0))[:, :-1]
        joined = self.join(torch.cat([self.norm_state(before), self.norm_token(embedded)], dim=-1))
        return self.block(joined)


class MultiTokenGPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner, length):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.trunk = nn.ModuleList([CausalBlock(width, heads, inner) for _ in range(layers)])
        self.predictor = Predictor(width, heads, inner)
        self.ln_f, self.ln_p = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        embedded = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        x = embedded
        for block in self.trunk:
            x = block(x)
        ahead = self.predictor(x, embedded)
        return torch.cat([self.head(self.ln_f(x)), self.head(self.ln_p(ahead))], dim=-1)


def build(c: DrawnConfig):
    return MultiTokenGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)


subject = Subject(
    kind="decoder",
    name="multi-token prediction",
    build=build,
    forward=lambda model, tokens: model(tokens),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "structure": "other"},
)
