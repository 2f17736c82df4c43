# A GPT-2 with an explicit key-value cache: a flat list k0, v0, k1, v1, ...
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


@dataclass
class GPTSizes:
    vocab: int
    width: int
    heads: int
    depth: int
    context: int


class CachedAttention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s.heads
        self.c_attn = nn.Linear(s.width, 3 * s.width)
        self.c_proj = nn.Linear(s.width, s.width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, past_k, past_v):
        q, k, v = (self.split(part) for part in self.c_attn(x).chunk(3, dim=-1))
        if past_k is not None:
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        new, total = q.size(2), k.size(2)
        hidden = torch.ones(new, total, dtype=torch.bool, device=x.device).triu(total - new + 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2)), k, v


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
        self.attn = CachedAttention(s)
        self.fc, self.proj = nn.Linear(s.width, 4 * s.width), nn.Linear(4 * s.width, s.width)

    def forward(self, x, past_k=None, past_v=None):
        a, k, v = self.attn(self.ln_1(x), past_k, past_v)
        x = x + a
        x = x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return x, k, v


class GPT(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.wte = nn.Embedding(s.vocab, s.width)
        self.wpe = nn.Embedding(s.context, s.width)
        self.h = nn.ModuleList(Block(s) for _ in range(s.depth))
        self.ln_f = nn.LayerNorm(s.width)
        self.lm_head = nn.Linear(s.width, s.vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, past=None):
        seen = 0 if past is None else past[0].size(2)
        x = self.wte(idx) + self.wpe(torch.arange(seen, seen + idx.size(1), device=idx.device))
        present = []
        for i, block in enumerate(self.h):
            k, v = (None, None) if past is None else past[2 * i : 2 * i + 2]
            x, k, v = block(x, k, v)
            present += [k, v]
        return self.lm_head(self.ln_f(x)), present

    def reorder(self, past, order):
        past = list(past)
        for i in range(len(past)):
            past[i] = past[i].index_select(0, order)
        return past


def decode(model, chunks, reorder=None):
    outputs, past = [], None
    for number, chunk in enumerate(chunks):
        logits, past = model(chunk, past)
        outputs.append(logits)
        if number == 0 and reorder is not None:
            past = model.reorder(past, torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT with a cache",
    build=lambda c: GPT(GPTSizes(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len)),
    forward=lambda model, tokens: model(tokens)[0],
    cache=decode,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "bias": True,
    },
)
