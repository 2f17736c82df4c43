import math

import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject


def alibi_slopes(n):
    """Those of the authors' code, for any number of heads."""

    def power(m):
        return [2.0 ** (-8.0 * (i + 1) / m) for i in range(m)]

    if math.log2(n).is_integer():
        return power(n)
    below = 2 ** int(math.log2(n))
    return power(below) + power(2 * below)[0::2][: n - below]


class ParallelBlock(nn.Module):
    """PaLM: attention and feed-forward side by side, one norm, no biases."""

    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.h, self.g, self.k = heads, kv_heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, heads * self.k, bias=False)
        self.to_kv = nn.Linear(width, 2 * kv_heads * self.k, bias=False)
        self.to_out = nn.Linear(heads * self.k, width, bias=False)
        self.ff_in = nn.Linear(width, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, width, bias=False)
        self.slopes = alibi_slopes(heads)

    def project(self, y):
        B, T, _ = y.shape
        q = self.to_q(y).view(B, T, self.h, self.k).transpose(1, 2)
        keys, values = self.to_kv(y).chunk(2, dim=-1)
        keys = keys.view(B, T, self.g, self.k).transpose(1, 2)
        values = values.view(B, T, self.g, self.k).transpose(1, 2)
        return q, keys, values

    def mix(self, q, keys, values, start):
        T, S = q.shape[2], keys.shape[2]
        i = torch.arange(start, start + T, device=q.device)[:, None]
        j = torch.arange(S, device=q.device)[None, :]
        slopes = torch.tensor(self.slopes, dtype=q.dtype, device=q.device)[:, None, None]
        scores = q @ keys.mT * self.k**-0.5 + slopes * (j - i).to(q.dtype)
        weights = scores.masked_fill(j > i, -torch.inf).softmax(-1)
        return self.to_out((weights @ values).transpose(1, 2).flatten(2))

    def forward(self, x):
        y = self.norm(x)
        q, keys, values = self.project(y)
        n = self.h // self.g
        attended = self.mix(q, keys.repeat_interleave(n, dim=1), values.repeat_interleave(n, dim=1), 0)
        return x + attended + self.ff_out(nn.functional.gelu(self.ff_in(y)))

    def step(self, x, store):
        y = self.norm(x)
        q, keys, values = self.project(y)
        start = 0
        if store:
            start = store["k"].shape[2]
            keys, values = torch.cat((store["k"], keys), 2), torch.cat((store["v"], values), 2)
        store["k"], store["v"] = keys, values
        n = self.h // self.g
        keys, values = (z.repeat_interleave(n, dim=1) for z in (keys, values))
        return x + self.mix(q, keys, values, start) + self.ff_out(nn.functional.gelu(self.ff_in(y)))


class PaLM(nn.Module):
    def __init__(self, vocab, width, heads, kv_heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(ParallelBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))

    def decode(self, chunks):
        stores = [{} for _ in self.blocks]
        outputs = []
        for tokens in chunks:
            x = self.embed(tokens)
            for block, store in zip(self.blocks, stores):
                x = block.step(x, store)
            outputs.append(self.unembed(self.norm(x)))
        return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="PaLM with grouped queries",
    build=lambda c: PaLM(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    cache=lambda model, chunks: model.decode(chunks),
    declares={"positions": "alibi", "grouped_queries": True, "norm": "layer", "activation": "gelu"},
)
