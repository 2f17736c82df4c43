import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def rotate(x, start):
    t, k = x.shape[-2:]
    inv = 10000 ** (-torch.arange(0, k, 2, device=x.device, dtype=torch.float32) / k)
    ang = torch.outer(torch.arange(start, start + t, device=x.device, dtype=torch.float32), inv)
    cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LlamaBlock(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.input_norm, self.post_norm = RMSNorm(d), RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, allowed, past=None, start=0):
        y = self.input_norm(x)
        q, k, v = (z(y).unflatten(-1, (self.h, -1)).transpose(1, 2) for z in (self.q, self.k, self.v))
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        s = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        p = s.masked_fill(~allowed, torch.finfo(s.dtype).min).softmax(-1) * allowed
        x = x + self.o((p @ v).transpose(1, 2).flatten(2))
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), (k, v)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(LlamaBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None, past=None, start=0):
        t = tokens.size(1)
        seen = 0 if past is None else past[0][0].size(2)
        allowed = torch.ones(t, seen + t, dtype=torch.bool, device=tokens.device).tril(seen)[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :].bool()
        x, new = self.embed(tokens), []
        for n, layer in enumerate(self.layers):
            x, kv = layer(x, allowed, None if past is None else past[n], start)
            new.append(kv)
        return self.head(self.norm(x)), new

    def decode(self, chunks, mask=None, reorder=None):
        outs, past, start, seen_mask, end = [], None, 0, None, 0
        for step, chunk in enumerate(chunks):
            if mask is not None:
                part = mask[:, end : end + chunk.size(1)]
                seen_mask = part if seen_mask is None else torch.cat((seen_mask, part), dim=1)
            end += chunk.size(1)
            logits, past = self(chunk, seen_mask, past, start)
            outs.append(logits)
            start = past[0][0].size(2)
            if step == 0 and reorder is not None:
                past = [(k[reorder], v[reorder]) for k, v in past]
                seen_mask = None if seen_mask is None else seen_mask[reorder]
        return torch.cat(outs, dim=1)


subject = Subject(
    kind="decoder",
    build=Llama,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=lambda m, chunks, attention_mask=None, reorder=None: m.decode(chunks, attention_mask, reorder),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True, "activation": "swiglu", "bias": False, "output_bias": False, "tied": False},
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
)
