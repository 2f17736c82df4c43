"""GPT with prefix tuning (Li & Liang 2021): every layer has keys and values of its own before those of the tokens."""

import torch
from torch import nn

from veriformer.properties import Subject


class PrefixedAttention(nn.Module):
    def __init__(self, width, heads, prefix):
        super().__init__()
        self.heads, self.prefix = heads, prefix
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.prefix_k = nn.Parameter(torch.randn(heads, prefix, width // heads))
        self.prefix_v = nn.Parameter(torch.randn(heads, prefix, width // heads))

    def forward(self, x, attention_mask):
        b, t, w = x.shape
        q, k, v = [p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.c_attn(x).split(w, dim=2)]
        k = torch.cat([self.prefix_k.expand(b, -1, -1, -1), k], dim=2)
        v = torch.cat([self.prefix_v.expand(b, -1, -1, -1), v], dim=2)
        always = attention_mask.new_ones(b, self.prefix)
        keys = torch.cat([always, attention_mask], dim=1)
        past = torch.ones(t, self.prefix + t, dtype=torch.bool, device=x.device).tril(self.prefix)
        allowed = past & keys[:, None, None, :]
        scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    def __init__(self, width, heads, hidden, prefix):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = PrefixedAttention(width, heads, prefix)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width))

    def forward(self, x, attention_mask):
        x = x + self.attn(self.ln_1(x), attention_mask)
        return x + self.mlp(self.ln_2(x))


class PrefixGPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, longest, prefix=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, prefix) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(ids, dtype=torch.bool)
        position = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.wte(ids) + self.wpe(position)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.ln_f(x) @ self.wte.weight.t()


subject = Subject(
    kind="decoder",
    build=lambda c: PrefixGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "learned", "padding_side": "both", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu_tanh", "tied": True,
    },
)
