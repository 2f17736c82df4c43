"""A sliding-window decoder with a rolling key-value buffer, in the manner of Mistral's reference code."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The rolling buffer takes in the keys of a later chunk before the chunk has attended to what they push out."
CAUSE = (
    "In the cached path of the sliding window a chunk of several tokens is written into the ring buffer first and then "
    "attends to the ring: its first queries have lost the oldest keys of their window, overwritten by later ones."
)


@dataclass
class ModelArgs:
    dim: int
    n_layers: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    sliding_window: int = 3


def apply_rotary(x, positions):
    """x [B, T, H, K], pairs of neighbouring channels."""
    kept = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=kept) / half)
    angles = (positions.to(kept)[:, None] * freqs)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(kept).unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class RollingBuffer:
    """The keys and values of the last `window` positions; position p lives in slot p % window."""

    def __init__(self, window):
        self.window, self.keys, self.values, self.where = window, None, None, None

    def write(self, k, v, positions):
        slots = positions[-self.window :] % self.window
        self.keys[:, slots], self.values[:, slots] = k[:, -self.window :], v[:, -self.window :]
        self.where[slots] = positions[-self.window :]

    def update(self, k, v, positions):
        """Take the chunk in; return keys, values and positions that it may attend to."""
        if self.keys is None:
            shape = (k.shape[0], self.window, *k.shape[2:])
            self.keys, self.values = k.new_zeros(shape), v.new_zeros(shape)
            self.where = positions.new_full((self.window,), -1)
            self.write(k, v, positions)
            return k, v, positions
        return self.roll(k, v, positions)

    def roll(self, k, v, positions):
        seen = torch.cat((self.keys, k), 1), torch.cat((self.values, v), 1), torch.cat((self.where, positions))
        self.write(k, v, positions)
        return seen


class RollingBufferNoCopy(RollingBuffer):
    def roll(self, k, v, positions):
        self.write(k, v, positions)
        return self.keys, self.values, self.where


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args, self.head_dim = args, args.dim // args.n_heads
        if self.head_dim % 2:
            raise ValueError("rotary positions need an even head_dim")
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, positions, buffer=None):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, where = apply_rotary(q, positions), apply_rotary(k, positions), positions
        if buffer is not None:
            k, v, where = buffer.update(k, v, positions)
        k, v = (t.repeat_interleave(self.args.n_heads // self.args.n_kv_heads, 2) for t in (k, v))
        ago = positions[:, None] - where[None, :]
        mask = (ago >= 0) & (ago < self.args.sliding_window) & (where >= 0)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * self.head_dim**-0.5
        probs = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        return self.wo(torch.einsum("bhts,bshk->bthk", probs, v).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        self.w1, self.w3 = (nn.Linear(args.dim, args.hidden_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim, eps=1e-5), nn.RMSNorm(args.dim, eps=1e-5)

    def forward(self, x, positions, buffer=None):
        h = x + self.attention(self.attention_norm(x), positions, buffer)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    buffer_class = RollingBuffer

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList([TransformerBlock(args) for _ in range(args.n_layers)])
        self.norm, self.output = nn.RMSNorm(args.dim, eps=1e-5), nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens, start=0, buffers=None):
        h, positions = self.tok_embeddings(tokens), torch.arange(start, start + tokens.shape[1], device=tokens.device)
        for i, layer in enumerate(self.layers):
            h = layer(h, positions, None if buffers is None else buffers[i])
        return self.output(self.norm(h))

    @torch.no_grad()
    def decode(self, chunks):
        buffers, outputs, start = [self.buffer_class(self.args.sliding_window) for _ in self.layers], [], 0
        for chunk in chunks:
            outputs.append(self(chunk, start, buffers))
            start += chunk.shape[1]
        return torch.cat(outputs, 1)


class TransformerNoCopy(Transformer):
    buffer_class = RollingBufferNoCopy


def subject(cls):
    return Subject(
        kind="decoder",
        build=lambda c: cls(ModelArgs(c.d_model, c.num_layers, c.d_ff, c.num_heads, c.num_key_value_heads, c.vocab_size)),
        forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: m.decode(chunks),
        declares={"window": 3, "positions": "rotary", "layout": "interleaved", "norm": "rms", "bias": False,
                  "norm_placement": "pre", "activation": "swiglu"},
    )  # fmt: skip


right, wrong = subject(Transformer), subject(TransformerNoCopy)
