"""Primer's multi-DConv attention in a small decoder: a causal depthwise convolution of three taps behind q, k and v.

The cache holds keys and values and the last two projections, which the convolution of the next chunk needs.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

TAPS = 3


class DConvAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = nn.Conv1d(3 * dim, 3 * dim, TAPS, groups=3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, state=None):
        B, T, D = x.shape
        z = self.qkv(x).transpose(1, 2)
        tail = z.new_zeros(B, 3 * D, TAPS - 1) if state is None else state["tail"]
        z = torch.cat([tail, z], -1)
        tail = z[..., z.shape[-1] - (TAPS - 1) :]
        q, k, v = self.conv(z).view(B, 3, self.heads, -1, T).transpose(-1, -2).unbind(1)
        if state is not None:
            k, v = torch.cat([state["k"], k], 2), torch.cat([state["v"], v], 2)
        S = k.shape[2]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, D)), {"k": k, "v": v, "tail": tail}


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = DConvAttention(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, state=None):
        y, state = self.attention(self.n1(x), state)
        x = x + y
        return x + self.down(F.relu(self.up(self.n2(x))).square()), state  # squared ReLU


class Primer(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, states=None):
        x, new = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i])
            new.append(state)
        return self.head(self.norm(x)), new


def reorder_states(states, beams):
    return [{name: s.index_select(0, beams) if name in "kv" else s for name, s in state.items()} for state in states]


def cache(model, chunks, reorder=None):
    states, outputs = None, []
    for i, chunk in enumerate(chunks):
        y, states = model(chunk, states)
        outputs.append(y)
        if i == 0 and reorder is not None:
            beams = torch.as_tensor(reorder, dtype=torch.long, device=chunk.device)
            states = reorder_states(states, beams)
    return outputs


subject = Subject(
    kind="decoder",
    name="primer",
    build=lambda c: Primer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens)[0],
    cache=cache,
    declares={"causal": True, "positions": "other", "activation": "other", "norm_placement": "pre"},
)

WHAT = 'When beams are reordered the keys and values move, the tail of the convolution does not (line 69): the first tokens behind a reordering are convolved with the projections of another beam.'
