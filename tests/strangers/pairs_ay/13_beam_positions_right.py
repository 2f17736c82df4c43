"""Decoder for batched beam search: prompts padded on the left, positions count real tokens."""

from dataclasses import dataclass, field

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class State:
    keys: list = field(default_factory=list)
    values: list = field(default_factory=list)
    mask: torch.Tensor | None = None  # [B, tokens so far]
    seen: torch.Tensor | None = None  # [B, 1] real tokens so far

    def reorder(self, beams):
        self.keys = [k.index_select(0, beams) for k in self.keys]
        self.values = [v.index_select(0, beams) for v in self.values]
        self.mask = self.mask.index_select(0, beams)
        self.seen = self.seen.index_select(0, beams)


class Layer(nn.Module):
    def __init__(self, index, width, heads, hidden):
        super().__init__()
        self.index, self.heads = index, heads
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, allowed, state):
        h = self.norm_a(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if len(state.keys) > self.index:
            k = torch.cat([state.keys[self.index], k], dim=2)
            v = torch.cat([state.values[self.index], v], dim=2)
            state.keys[self.index], state.values[self.index] = k, v
        else:
            state.keys.append(k)
            state.values.append(v)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.size(-1) ** -0.5
        weights = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
        x = x + self.o(torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm_f(x))))


class Decoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.layers = nn.ModuleList(Layer(i, width, heads, hidden) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens, mask=None, state=None):
        batch, new = tokens.shape
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        state = State() if state is None else state
        if state.mask is None:
            state.mask = mask[:, :0]
            state.seen = torch.zeros(batch, 1, dtype=torch.long, device=tokens.device)
        count = state.seen + mask.long().cumsum(1)
        past = state.mask.size(1)
        state.mask = torch.cat([state.mask, mask], dim=1)
        state.seen = count[:, -1:]

        row = torch.arange(past, past + new, device=tokens.device)[:, None]
        column = torch.arange(past + new, device=tokens.device)[None, :]
        # a padding token sees itself, so that no row is empty
        allowed = (column <= row) & state.mask[:, None, :] | (column == row)
        x = self.tokens(tokens) + self.places((count - 1).clamp(min=0))
        for layer in self.layers:
            x = layer(x, allowed, state)
        return self.head(self.norm(x))


def cache(model, chunks, attention_mask=None, reorder=None):
    state, outputs, start = State(), [], 0
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            state.reorder(torch.as_tensor(reorder, device=chunk.device))
        end = start + chunk.size(1)
        mask = None if attention_mask is None else attention_mask[:, start:end]
        outputs.append(model(chunk, mask, state))
        start = end
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="decoder with beams",
    build=lambda c: Decoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cache,
    declares={
        "causal": True,
        "positions": "learned",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
    },
)
