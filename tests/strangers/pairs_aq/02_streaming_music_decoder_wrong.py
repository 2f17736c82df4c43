WHAT = 'the state of the causal convolution that is carried to the next chunk is cut from the chunk alone and zero-filled, not from old state and chunk together: with chunks shorter than the kernel older frames are lost, cached steps differ from the whole sequence (line 39: state.stem = F.pad(x, (self.kernel - 1, 0))[..., -(self.kernel - 1):])'
"""Streaming music-token decoder: causal convolutional stem, rotary attention, one state object for both."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class State:
    def __init__(self, layers):
        self.stem = None
        self.kv = [None] * layers
        self.seen = 0


def rotate(x, start):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    ang = torch.arange(start, start + x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * inv
    cos, sin = ang.cos(), ang.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Stem(nn.Module):
    """Depthwise-separable causal convolution over the last `kernel` frames."""

    def __init__(self, d, kernel=4):
        super().__init__()
        self.kernel = kernel
        self.depth = nn.Conv1d(d, d, kernel, groups=d)
        self.point = nn.Conv1d(d, d, 1)

    def forward(self, x, state):
        x = x.transpose(1, 2)
        past = x.new_zeros(x.shape[0], x.shape[1], self.kernel - 1) if state.stem is None else state.stem
        joined = torch.cat([past, x], -1)
        state.stem = F.pad(x, (self.kernel - 1, 0))[..., -(self.kernel - 1):]
        return self.point(F.gelu(self.depth(joined))).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, state, i):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, state.seen), rotate(k, state.seen)
        if state.kv[i] is not None:
            k = torch.cat([state.kv[i][0], k], 2)
            v = torch.cat([state.kv[i][1], v], 2)
        state.kv[i] = (k, v)
        allowed = torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class MusicLM(nn.Module):
    def __init__(self, vocab, d, h, layers, ff):
        super().__init__()
        if (d // h) % 2:
            raise ValueError("rotary heads need an even width")
        self.emb, self.stem = nn.Embedding(vocab, d), Stem(d)
        self.blocks = nn.ModuleList([Block(d, h, ff) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, state=None):
        state = State(len(self.blocks)) if state is None else state
        x = self.emb(tokens)
        x = x + self.stem(x, state)
        for i, block in enumerate(self.blocks):
            x = block(x, state, i)
        state.seen += tokens.shape[1]
        return self.head(self.norm(x))


def stream(model, chunks):
    state = State(len(model.blocks))
    return torch.cat([model(chunk, state) for chunk in chunks], 1)


subject = Subject(
    kind="decoder",
    name="streaming music decoder",
    build=lambda c: MusicLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: stream(m, chunks),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "structure": "other"},
)
