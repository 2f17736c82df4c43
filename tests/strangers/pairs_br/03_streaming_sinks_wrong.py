WHAT = "the rolling cache evicts as soon as it holds more than the window, when the sinks still lie inside the last window: these keys are then kept twice and count twice in the softmax of the next step (line 36)"
"""StreamingLLM with a rolling cache: the first tokens stay as attention sinks, the rest is a sliding window."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4
SINKS = 2


def apply_rotary(x, pos):
    half = x.size(-1) // 2
    theta = pos.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RollingCache:
    """Keys (already rotated), values and the absolute positions of what one layer has kept."""

    def __init__(self, sinks, window):
        self.sinks, self.window = sinks, window
        self.k = self.v = self.pos = None

    def append(self, k, v, pos):
        if self.k is not None:
            k, v, pos = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.pos, pos])
        self.k, self.v, self.pos = k, v, pos
        self.evict()
        return k, v, pos  # the queries of this chunk see what was there before the eviction

    def evict(self):
        if self.k.size(2) > self.window:
            self.k = torch.cat([self.k[:, :, : self.sinks], self.k[:, :, -self.window :]], 2)
            self.v = torch.cat([self.v[:, :, : self.sinks], self.v[:, :, -self.window :]], 2)
            self.pos = torch.cat([self.pos[: self.sinks], self.pos[-self.window :]])


class Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        assert (d_model // n_heads) % 2 == 0, "head width must be even"
        self.h = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.wqkv, self.wo = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def attend(self, x, pos, cache):
        B, T, D = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        q, k = apply_rotary(q, pos), apply_rotary(k, pos)
        key_pos = pos
        if cache is not None:
            k, v, key_pos = cache.append(k, v, pos)
        behind = pos[:, None] - key_pos[None, :]
        visible = (behind >= 0) & ((behind < WINDOW) | (key_pos < SINKS))
        att = q @ k.transpose(-1, -2) * k.size(-1) ** -0.5
        att = att.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.wo((att @ v).transpose(1, 2).reshape(B, T, D))

    def forward(self, x, pos, cache=None):
        x = x + self.attend(self.norm1(x), pos, cache)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class StreamingLM(nn.Module):
    def __init__(self, vocab, d_model, n_heads, n_layers, d_ff):
        super().__init__()
        self.emb = nn.Embedding(vocab, d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab)

    def forward(self, tokens, caches=None, start=0):
        x = self.emb(tokens)
        pos = torch.arange(start, start + tokens.size(1), device=tokens.device)
        for i, block in enumerate(self.blocks):
            x = block(x, pos, None if caches is None else caches[i])
        return self.head(self.norm(x))

    def stream(self, chunks):
        caches, start, outs = [RollingCache(SINKS, WINDOW) for _ in self.blocks], 0, []
        for chunk in chunks:
            outs.append(self(chunk, caches, start))
            start += chunk.size(1)
        return torch.cat(outs, 1)


subject = Subject(
    kind="decoder",
    name="StreamingLM",
    build=lambda c: StreamingLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks: m.stream(chunks),
    declares={
        "causal": True,
        "window": WINDOW,
        "sink_tokens": SINKS,
        "positions": "rotary",
        "layout": "halves",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)
