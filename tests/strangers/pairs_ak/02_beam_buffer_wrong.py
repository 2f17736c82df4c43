WHAT = "Beam reorder copies rows of the cache buffer in place one after another (Session.reorder, line 76), so a parent whose row was already overwritten is read after it was replaced."
"""GPT whose key-value cache is one preallocated buffer; beam search permutes its rows in place."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def project(self, x):
        B, T, C = x.shape
        return self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)

    def finish(self, x, q, k, v):
        T, S = q.shape[2], k.shape[2]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, max_len):
        super().__init__()
        self.max_len = max_len
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block.finish(x, *block.project(x))
        return self.head(self.ln_f(x))


class Session:
    """Serves one batch of beams."""

    def __init__(self, model, beams):
        self.model, self.length = model, 0
        weight = model.wte.weight
        heads = model.blocks[0].heads
        self.buffer = weight.new_zeros(
            len(model.blocks), 2, beams, heads, model.max_len, weight.shape[1] // heads, requires_grad=False
        )

    @torch.no_grad()
    def feed(self, tokens):
        start, end = self.length, self.length + tokens.shape[1]
        x = self.model.wte(tokens) + self.model.wpe(torch.arange(start, end, device=tokens.device))
        for block, (keys, values) in zip(self.model.blocks, self.buffer):
            q, k, v = block.project(x)
            keys[:, :, start:end], values[:, :, start:end] = k, v
            x = block.finish(x, q, keys[:, :, :end], values[:, :, :end])
        self.length = end
        return self.model.head(self.model.ln_f(x))

    @torch.no_grad()
    def reorder(self, parents):
        past = self.buffer[..., : self.length, :]
        for row, parent in enumerate(torch.as_tensor(parents).tolist()):
            if row != parent:
                past[:, :, row].copy_(past[:, :, parent])


def cached(model, chunks, reorder=None):
    session, given = Session(model, chunks[0].shape[0]), []
    for i, chunk in enumerate(chunks):
        given.append(session.feed(chunk))
        if i == 0 and reorder is not None:
            session.reorder(reorder)
    return torch.cat(given, dim=1)


subject = Subject(
    kind="decoder",
    name="gpt with beams in one buffer",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu", "tied": False,
    },
)
