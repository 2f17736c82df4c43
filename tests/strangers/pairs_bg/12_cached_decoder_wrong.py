WHAT = "Reordering the cache for beams (line 34) gathers keys and mask but leaves the values where they were: after a reorder each beam weighs the values of another."
"""A Llama-like decoder; its cache is a value (as a pytree), fixed in size and updated by slice_scatter."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


class KV(NamedTuple):
    k: Tensor  # [B, G, L, K]
    v: Tensor
    live: Tensor  # [B, L]
    index: int

    @classmethod
    def empty(cls, batch, groups, length, depth, like):
        zeros = like.new_zeros(batch, groups, length, depth)
        return cls(zeros, zeros, torch.zeros(batch, length, dtype=torch.bool, device=like.device), 0)

    def write(self, k, v, live):
        stop = self.index + k.shape[2]
        return KV(
            torch.slice_scatter(self.k, k, 2, self.index, stop),
            torch.slice_scatter(self.v, v, 2, self.index, stop),
            torch.slice_scatter(self.live, live, 1, self.index, stop),
            stop,
        )

    def gather(self, beams):
        return self._replace(k=self.k[beams], live=self.live[beams])


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.g


def rope(x, start):
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(start, start + x.shape[-2], device=x.device)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, d, heads, groups, ff):
        super().__init__()
        self.heads, self.groups, self.depth = heads, groups, d // heads
        if self.depth % 2:
            raise ValueError("rotary positions need heads of even width")
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)
        self.wq = nn.Linear(d, d, bias=False)
        self.wk = nn.Linear(d, groups * self.depth, bias=False)
        self.wv = nn.Linear(d, groups * self.depth, bias=False)
        self.wo = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.down = nn.Linear(ff, d, bias=False)

    def forward(self, x, live, kv):
        B, T, _ = x.shape
        h = self.n1(x)
        q = rope(self.wq(h).view(B, T, self.heads, -1).transpose(1, 2), kv.index)
        k = rope(self.wk(h).view(B, T, self.groups, -1).transpose(1, 2), kv.index)
        v = self.wv(h).view(B, T, self.groups, -1).transpose(1, 2)
        row = torch.arange(kv.index, kv.index + T, device=x.device)[:, None]
        kv = kv.write(k, v, live)
        col = torch.arange(kv.k.shape[2], device=x.device)
        allowed = (col <= row) & kv.live[:, None, None, :]
        repeat = self.heads // self.groups
        s = q @ kv.k.repeat_interleave(repeat, 1).transpose(-1, -2) / self.depth**0.5
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        a = s.softmax(-1) @ kv.v.repeat_interleave(repeat, 1)
        x = x + self.wo(a.transpose(1, 2).reshape(B, T, -1))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), kv


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.groups, self.depth = c.num_key_value_heads, c.d_model // c.num_heads
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, self.groups, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def init_cache(self, batch, length):
        like = self.embed.weight
        return [KV.empty(batch, self.groups, length, self.depth, like) for _ in self.blocks]

    def forward(self, tokens, live=None, cache=None):
        if live is None:
            live = torch.ones_like(tokens, dtype=torch.bool)
        if cache is None:
            cache = self.init_cache(*tokens.shape)
        x, new = self.embed(tokens), []
        for block, kv in zip(self.blocks, cache):
            x, kv = block(x, live, kv)
            new.append(kv)
        return self.head(self.norm(x)), new


def cached(model, chunks, attention_mask=None, reorder=None):
    lengths = [chunk.shape[1] for chunk in chunks]
    if attention_mask is None:
        attention_mask = torch.ones(chunks[0].shape[0], sum(lengths), dtype=torch.bool, device=chunks[0].device)
    state, outputs = model.init_cache(chunks[0].shape[0], sum(lengths)), []
    for n, (chunk, live) in enumerate(zip(chunks, attention_mask.split(lengths, dim=1))):
        if n == 1 and reorder is not None:
            beams = torch.as_tensor(reorder, device=chunk.device)
            state = [kv.gather(beams) for kv in state]
        out, state = model(chunk, live, state)
        outputs.append(out)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="decoder with a cache as a value",
    build=Decoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
        "padding_side": "both",
    },
)
