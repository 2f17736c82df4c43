"""Encoder-decoder with pre-norm for speech units; encoder states at padding are zeroed before the decoder reads them."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


def sincos(length, like):
    d = like.shape[-1]
    even = torch.arange(0, d, 2, dtype=torch.float64, device=like.device)
    angle = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * 10000.0 ** (-even / d)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :d].to(like.dtype)


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, memory, allowed):  # allowed [B or 1, T or 1, S] or None
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if allowed is not None:
            s = s.masked_fill(~allowed[:, None], torch.finfo(s.dtype).min)
            w = s.softmax(-1).masked_fill(~allowed[:, None], 0.0)
        else:
            w = s.softmax(-1)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, d, f):
        super().__init__(nn.Linear(d, f), nn.ReLU(), nn.Linear(f, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att, self.ff = Attention(d, h), FeedForward(d, f)

    def forward(self, x, allowed):
        y = self.n1(x)
        x = x + self.att(y, y, allowed)
        return x + self.ff(self.n2(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.att, self.cross, self.ff = Attention(d, h), Attention(d, h), FeedForward(d, f)

    def forward(self, x, memory, allowed, seen):
        y = self.n1(x)
        x = x + self.att(y, y, allowed)
        x = x + self.cross(self.n2(x), memory, seen)
        return x + self.ff(self.n3(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, h, f, depth):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.enc = nn.ModuleList([EncoderLayer(d, h, f) for _ in range(depth)])
        self.dec = nn.ModuleList([DecoderLayer(d, h, f) for _ in range(depth)])
        self.enc_norm, self.dec_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.out = nn.Linear(d, vocab)

    def forward(self, source, target, source_mask=None, target_mask=None):
        x = self.src(source)
        x = x + sincos(source.shape[1], x)
        seen = None if source_mask is None else source_mask[:, None, :]
        for layer in self.enc:
            x = layer(x, seen)
        memory = self.enc_norm(x)
        if source_mask is not None:
            memory = memory * source_mask[..., None].to(memory.dtype)
        y = self.tgt(target)
        T = target.shape[1]
        y = y + sincos(T, y)
        allowed = torch.ones(1, T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, :]
        for layer in self.dec:
            y = layer(y, memory, allowed, seen)
        return self.out(self.dec_norm(y))


subject = Subject(
    kind="encoder_decoder",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "sinusoidal", "norm_placement": "pre", "activation": "relu", "padding_side": "right"},
)
