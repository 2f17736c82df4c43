WHAT = "target padding and causal mask, both True = may attend, are joined by or, so that whenever a target mask is given every real token sees the future (line 85)."
import math

import torch
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, x, y, mask=None):
        q, k, v = (
            w(z).view(z.size(0), z.size(1), self.n_heads, -1).transpose(1, 2)
            for w, z in ((self.q, x), (self.k, y), (self.v, y))
        )
        energy = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            energy = energy.masked_fill(~mask, torch.finfo(energy.dtype).min)
        out = torch.softmax(energy, dim=-1) @ v
        return self.o(out.transpose(1, 2).reshape(x.size(0), x.size(1), -1))


class FeedForward(nn.Sequential):
    def __init__(self, d_model, d_ff):
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn, self.ff = Attention(d_model, n_heads), FeedForward(d_model, d_ff)
        self.n1, self.n2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask):
        x = self.n1(x + self.attn(x, x, mask))
        return self.n2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn, self.cross = Attention(d_model, n_heads), Attention(d_model, n_heads)
        self.ff = FeedForward(d_model, d_ff)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, memory, mask, memory_mask):
        x = self.n1(x + self.attn(x, x, mask))
        x = self.n2(x + self.cross(x, memory, memory_mask))
        return self.n3(x + self.ff(x))


def sinusoids(length, d_model, like):
    pos = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    rate = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64, device=like.device) / d_model)
    table = torch.stack((torch.sin(pos * rate), torch.cos(pos * rate)), dim=-1).flatten(1)
    return table[:, :d_model].to(like.dtype)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d_model, n_heads, d_ff, n_layers):
        super().__init__()
        self.d_model = d_model
        self.src_emb, self.trg_emb = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.fc_out = nn.Linear(d_model, vocab)

    def embed(self, table, tokens):
        x = table(tokens) * math.sqrt(self.d_model)
        return x + sinusoids(tokens.size(1), self.d_model, x)

    def make_trg_mask(self, trg, trg_pad):
        length = trg.size(1)
        causal = torch.tril(torch.ones(length, length, dtype=torch.bool, device=trg.device))[None, None]
        if trg_pad is None:
            return causal
        return torch.logical_or(causal, trg_pad[:, None, None, :])

    def forward(self, src, trg, src_pad=None, trg_pad=None):
        src_mask = None if src_pad is None else src_pad[:, None, None, :]
        trg_mask = self.make_trg_mask(trg, trg_pad)
        memory = self.embed(self.src_emb, src)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        x = self.embed(self.trg_emb, trg)
        for layer in self.decoder:
            x = layer(x, memory, trg_mask, src_mask)
        return self.fc_out(x)


subject = Subject(
    kind="encoder_decoder",
    name="translation model",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    mask_forms=("padding",),
    declares={
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "tied": False,
        "padding_side": "right",
    },
)
