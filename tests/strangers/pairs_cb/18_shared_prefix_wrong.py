WHAT = "Prefix sharing: the length of the common prompt is counted as all columns in which the batch agrees (`same.sum()` in common_prefix), not those before the first difference, so that rows may be given the prefix of row 0."
"""A decoder that computes the common prefix of a batch once (shared system prompts)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def common_prefix(tokens):
    same = (tokens == tokens[:1]).all(0).long()
    return int(same.sum())


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, prefix=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        if prefix is not None:
            k = torch.cat((prefix[0].expand(B, -1, -1, -1), k), 2)
            v = torch.cat((prefix[1].expand(B, -1, -1, -1), v), 2)
        S = k.shape[2]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, S, dtype=torch.bool).tril(S - T))
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x)))), (k, v)


class PrefixGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)

    def run(self, tokens, start, prefixes):
        x = self.tok(tokens) + self.pos(torch.arange(start, start + tokens.shape[1]))
        kept = []
        for layer, prefix in zip(self.layers, prefixes):
            x, kv = layer(x, prefix)
            kept.append(kv)
        return F.linear(self.norm(x), self.tok.weight), kept

    def forward(self, tokens):
        B, T = tokens.shape
        shared = common_prefix(tokens) if B > 1 else 0
        nothing = [None] * len(self.layers)
        if shared == 0:
            return self.run(tokens, 0, nothing)[0]
        head, prefixes = self.run(tokens[:1, :shared], 0, nothing)
        head = head.expand(B, -1, -1)
        if shared == T:
            return head
        return torch.cat((head, self.run(tokens[:, shared:], shared, prefixes)[0]), 1)


subject = Subject(
    kind="decoder",
    name="prefix sharing",
    build=PrefixGPT,
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "learned", "tied": True, "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)
