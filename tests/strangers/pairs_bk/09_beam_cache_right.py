import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class KVCache:
    """Preallocated keys and values of one layer."""

    def __init__(self, batch, heads, max_len, width, like):
        self.k = torch.zeros(batch, heads, max_len, width, dtype=like.dtype, device=like.device)
        self.v = torch.zeros_like(self.k)
        self.length = 0

    def append(self, k, v):
        end = self.length + k.size(2)
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reorder(self, beams):
        for buffer in (self.k, self.v):
            moved = buffer[torch.as_tensor(beams, device=buffer.device)]
            for row in range(len(beams)):
                buffer[row] = moved[row]


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        if past is not None:
            k, v = past.append(k, v)
        S = k.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        att = F.softmax(att.masked_fill(~mask, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(approximate="tanh"), nn.Linear(n_inner, n_embd))

    def forward(self, x, past=None):
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.max_len, self.n_head = c.max_len, c.num_heads
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, idx, pasts=None):
        start = pasts[0].length if pasts else 0
        x = self.wte(idx) + self.wpe(torch.arange(start, start + idx.size(1), device=idx.device))
        for i, block in enumerate(self.h):
            x = block(x, pasts[i] if pasts else None)
        return F.linear(self.ln_f(x), self.wte.weight)


@torch.no_grad()
def decode_in_chunks(model, chunks, reorder=None):
    weight = model.wte.weight
    batch, width = chunks[0].size(0), weight.size(1) // model.n_head
    pasts = [KVCache(batch, model.n_head, model.max_len, width, weight) for _ in model.h]
    outputs = []
    for number, chunk in enumerate(chunks):
        outputs.append(model(chunk, pasts))
        if number == 0 and reorder is not None:
            for past in pasts:
                past.reorder([int(b) for b in reorder])
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    build=GPT2,
    forward=lambda model, tokens: model(tokens),
    cache=decode_in_chunks,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "output_bias": False,
    },
)
