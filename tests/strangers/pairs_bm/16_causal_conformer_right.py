"""A causal Conformer-like decoder (attention, then a depthwise convolution that tells the order), with streaming state."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

KERNEL = 4


class CausalConv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.dw = nn.Conv1d(d, d, KERNEL, groups=d)
        self.pw = nn.Linear(d, d)

    def forward(self, x, state):
        x = x.transpose(1, 2)
        if state is None:
            state = x.new_zeros(x.shape[0], x.shape[1], KERNEL - 1)
        full = torch.cat((state, x), dim=-1)
        keep = full[..., -(KERNEL - 1):]
        return self.pw(F.silu(self.dw(full)).transpose(1, 2)), keep


class CausalAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, state):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.h, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if state is not None:
            k, v = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2)
        w = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(d // self.h)
        hide = torch.ones(t, k.shape[2], dtype=torch.bool, device=x.device).triu(k.shape[2] - t + 1)
        w = w.masked_fill(hide, -math.inf).softmax(-1)
        return self.out(torch.einsum("bhts,bhsk->bthk", w, v).reshape(b, t, d)), (k, v)


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention, self.conv = CausalAttention(d, h), CausalConv(d)
        self.mlp = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, state=(None, None)):
        y, kv = self.attention(self.n1(x), state[0])
        x = x + y
        y, conv = self.conv(self.n2(x), state[1])
        x = x + y
        return x + self.mlp(self.n3(x)), (kv, conv)


class CausalConformer(nn.Module):
    def __init__(self, vocab, d, h, n, ff):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([Layer(d, h, ff) for _ in range(n)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def step(self, tokens, states):
        x, new = self.embed(tokens), []
        for layer, state in zip(self.layers, states):
            x, state = layer(x, state)
            new.append(state)
        return self.head(self.norm(x)), new

    def forward(self, tokens):
        return self.step(tokens, [(None, None)] * len(self.layers))[0]

    def streamed(self, chunks):
        states, out = [(None, None)] * len(self.layers), []
        for chunk in chunks:
            y, states = self.step(chunk, states)
            out.append(y)
        return torch.cat(out, dim=1)


subject = Subject(
    kind="decoder",
    name="causal conformer",
    build=lambda c: CausalConformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: m.streamed(chunks),
    declares={"positions": "other", "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu",
              "output_bias": True, "structure": "other"},
)
