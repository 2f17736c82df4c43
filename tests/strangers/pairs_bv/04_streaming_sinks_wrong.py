WHAT = "the sink columns are joined to the window after the causal condition, so the first query sees the second sink token, which lies in its future (line 17: return causal & near | sink)"
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


WINDOW, SINKS = 4, 2


def streaming_mask(T, device):
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(T, device=device)[None, :]
    causal, near, sink = j <= i, i - j < WINDOW, j < SINKS
    return causal & near | sink


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def attn(self, x, allowed):
        B, T, C = x.size()
        q, k, v = (z.view(B, T, self.h, C // self.h).transpose(1, 2) for z in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(~allowed, torch.finfo(att.dtype).min).softmax(-1) * allowed
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))

    def forward(self, x, allowed):
        x = x + self.attn(self.ln_1(x), allowed)
        return x + self.mlp(self.ln_2(x))


class StreamingGPT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.h = nn.ModuleList(Block(d, h, ff) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx, attention_mask=None):
        allowed = streaming_mask(idx.size(1), idx.device)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        x = self.wte(idx)
        for block in self.h:
            x = block(x, allowed)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    build=lambda c: StreamingGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": True, "positions": "none", "window": WINDOW, "sink_tokens": SINKS, "norm_placement": "pre", "activation": "gelu", "padding_side": "right"},
)
