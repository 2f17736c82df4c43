"""Encoder-decoder for a device that compiles a program a length: sources are padded to buckets of eight inside the model."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BUCKET = 8


def timing_signal(length, channels, like):
    pos = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    i = torch.arange(channels, device=like.device)
    angle = pos * 10000.0 ** (-(i - i % 2).to(torch.float64) / channels)
    return torch.where(i % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)


def dot_product_attention(q, k, v, allowed):
    s = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    if allowed is not None:
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
    w = s.softmax(-1)
    if allowed is not None:
        w = w.masked_fill(~allowed, 0.0)
    return torch.einsum("...hqk,...khd->...qhd", w, v)


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, y, allowed):
        q, k, v = (f(z).unflatten(-1, (self.h, -1)) for f, z in ((self.query, x), (self.key, y), (self.value, y)))
        return self.out(dot_product_attention(q, k, v, allowed).flatten(-2))


class Layer(nn.Module):
    def __init__(self, d, h, ff, cross):
        super().__init__()
        self.attn, self.ln1, self.ln3 = MHA(d, h), nn.LayerNorm(d), nn.LayerNorm(d)
        self.cross, self.ln2 = (MHA(d, h), nn.LayerNorm(d)) if cross else (None, None)
        self.wi, self.wo = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        y = self.ln1(x)
        x = x + self.attn(y, y, allowed)
        if self.cross is not None:
            x = x + self.cross(self.ln2(x), memory, memory_allowed)
        return x + self.wo(F.relu(self.wi(self.ln3(x))))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, h, n, ff):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList(Layer(d, h, ff, False) for _ in range(n))
        self.decoder = nn.ModuleList(Layer(d, h, ff, True) for _ in range(n))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.logits = nn.Linear(d, vocab, bias=False)

    def embed(self, tokens):
        x = self.shared(tokens)
        return x + timing_signal(x.shape[1], x.shape[2], x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        real = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        extra = -source.shape[1] % BUCKET
        source, real = F.pad(source, (0, extra), value=0), F.pad(real, (0, extra), value=False)
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, real[:, None, None, :])
        memory = self.encoder_norm(memory)

        T = target.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        memory_allowed = real[:, None, None, :]
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, allowed, memory, memory_allowed)
        return self.logits(self.decoder_norm(x))


subject = Subject(
    kind="encoder_decoder",
    name="bucketed seq2seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "sinusoidal", "norm_placement": "pre", "activation": "relu", "padding_side": "right"},
)
