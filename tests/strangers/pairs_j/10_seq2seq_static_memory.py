"""A translator whose cross-attention keeps the projected memory while it translates."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the projected memory that is kept for inference is not cleared for the next source of the same shape"
CAUSE = (
    "Cross-attention keeps keys and values of the memory of an earlier call (state left between calls, keyed on the "
    "shape alone), so that without gradients a second source of the same shape is translated as the first."
)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def keys_and_values(self, memory):
        B, S, _ = memory.shape
        return self.key_value(memory).view(B, S, 2, self.heads, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x, memory, allowed):
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.keys_and_values(memory)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class StaticAttention(Attention):
    """Over a memory that stays the same while a target is written: it is projected once."""

    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.static = None

    def keys_and_values(self, memory):
        if torch.is_grad_enabled():
            return super().keys_and_values(memory)
        kind = (memory.shape, memory.dtype, memory.device)
        if self.static is None or self.static[0] != kind:
            self.static = (kind, super().keys_and_values(memory))
        return self.static[1]


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, crosses):
        super().__init__()
        self.attention, self.norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.cross = StaticAttention(dim, heads) if crosses else None
        self.cross_norm = nn.LayerNorm(dim) if crosses else None
        self.ff_norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        h = self.norm(x)
        x = x + self.attention(h, h, allowed)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory, memory_allowed)
        return x + self.down(F.gelu(self.up(self.ff_norm(x))))


class Translator(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff, True) for _ in range(c.num_layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def begin(self):
        for layer in self.decoder:
            layer.cross.static = None

    def embed(self, tokens, real):
        count = torch.ones_like(tokens) if real is None else real.long()
        return self.tokens(tokens) + self.places((count.cumsum(1) - 1).clamp(min=0))

    def encode(self, source, real=None):
        x, allowed = self.embed(source, real), None if real is None else real[:, None, None]
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.encoder_norm(x)

    def decode(self, target, memory, memory_real=None, real=None):
        T = target.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if real is not None:
            allowed = allowed & real[:, None, None]
        seen = None if memory_real is None else memory_real[:, None, None]
        x = self.embed(target, real)
        for layer in self.decoder:
            x = layer(x, allowed, memory, seen)
        return self.head(self.decoder_norm(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        self.begin()
        y = self.decode(target, self.encode(source, source_mask), source_mask, target_mask)
        self.begin()
        return y

    @torch.no_grad()
    def translate(self, source, first, steps):
        self.begin()
        memory, target = self.encode(source), first
        for _ in range(steps):
            target = torch.cat((target, self.decode(target, memory)[:, -1].argmax(-1, keepdim=True)), 1)
        return target


class Interpreter(Translator):
    def begin(self):
        """A memory of another shape is projected anew by itself."""


def subject(model):
    return Subject(
        kind="encoder_decoder",
        name="translator",
        build=model,
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
    )


right = subject(Translator)
wrong = subject(Interpreter)
