"""A decoder whose feed-forward network mixes a token with the one before it (token shift, as RWKV has it)."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


@dataclass
class LayerState:
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    last: torch.Tensor | None = None  # [B, 1, D]: the last input of the feed-forward network

    def select(self, index):
        self.keys = self.keys[index]
        self.values = self.values[index]
        self.last = self.last[index]


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mix = nn.Parameter(torch.linspace(0.2, 0.8, dim))
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def attention(self, x, state):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if state.keys is not None:
            k, v = torch.cat((state.keys, k), 2), torch.cat((state.values, v), 2)
        state.keys, state.values = k, v
        T, S = q.shape[2], k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    def channel_mix(self, x, state):
        first = torch.zeros_like(x[:, :1]) if state.last is None else state.last
        before = torch.cat((first, x[:, :-1]), 1)
        state.last = x[:, -1:]
        x = x * self.mix + before * (1 - self.mix)
        return self.down(F.relu(self.up(x)).square())

    def forward(self, x, state):
        x = x + self.attention(self.ln1(x), state)
        return x + self.channel_mix(self.ln2(x), state)


class ShiftDecoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, states=None, start=0):
        states = states or [LayerState() for _ in self.layers]
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.emb(tokens) + self.pos(positions)
        for layer, state in zip(self.layers, states):
            x = layer(x, state)
        return self.head(self.norm(x))

    def chunked(self, chunks, reorder=None):
        states, start, outputs = [LayerState() for _ in self.layers], 0, []
        for number, chunk in enumerate(chunks):
            outputs.append(self(chunk, states, start))
            start += chunk.shape[1]
            if number == 0 and reorder is not None:
                for state in states:
                    state.select(reorder)
        return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="decoder with token shift",
    build=lambda c: ShiftDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks, reorder=None: m.chunked(chunks, reorder),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "other",
        "structure": "other",
    },
)
