"""A small pre-LN translation model in fairseq's manner: attention keeps its incremental state in itself."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

BOS = 1


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, static=False):
        super().__init__()
        self.num_heads, self.static = num_heads, static
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.saved = None

    def heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def keys_values(self, source, incremental):
        if incremental and self.static and self.saved is not None:
            if (self.saved[0].size(0), self.saved[0].size(2)) == (source.size(0), source.size(1)):
                return self.saved
        k, v = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        if incremental:
            if self.saved is not None and not self.static:
                k, v = torch.cat([self.saved[0], k], 2), torch.cat([self.saved[1], v], 2)
            self.saved = (k, v)
        return k, v

    def forward(self, query, source, allowed=None, incremental=False):
        q = self.heads(self.q_proj(query))
        k, v = self.keys_values(source, incremental)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, embed_dim, ffn_dim):
        super().__init__(nn.Linear(embed_dim, ffn_dim), nn.ReLU(), nn.Linear(ffn_dim, embed_dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.self_attn, self.ffn = MultiheadAttention(dim, heads), FeedForward(dim, ffn)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, allowed):
        y = self.norm1(x)
        x = x + self.self_attn(y, y, allowed)
        return x + self.ffn(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads)
        self.encoder_attn = MultiheadAttention(dim, heads, static=True)
        self.ffn = FeedForward(dim, ffn)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, memory, allowed, memory_allowed, incremental):
        y = self.norm1(x)
        x = x + self.self_attn(y, y, allowed, incremental)
        x = x + self.encoder_attn(self.norm2(x), memory, memory_allowed, incremental)
        return x + self.ffn(self.norm3(x))

    def reset_incremental_state(self):
        self.self_attn.saved = None
        self.encoder_attn.saved = None


class Transformer(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.source_positions, self.target_positions = nn.Embedding(max_len, dim), nn.Embedding(max_len, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, ffn) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, ffn) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def encode(self, source, source_mask=None):
        x = self.embed(source) + self.source_positions.weight[: source.size(1)]
        allowed = None if source_mask is None else source_mask[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.encoder_norm(x)

    def decode(self, target, memory, source_mask=None, target_mask=None, start=0, incremental=False):
        length = target.size(1)
        x = self.embed(target) + self.target_positions.weight[start : start + length]
        rows = torch.arange(start, start + length, device=target.device)
        allowed = (rows[:, None] >= torch.arange(start + length, device=target.device))[None, None]
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        memory_allowed = None if source_mask is None else source_mask[:, None, None, :]
        for layer in self.decoder:
            x = layer(x, memory, allowed, memory_allowed, incremental)
        return self.output(self.decoder_norm(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)

    @torch.no_grad()
    def incremental(self, source, chunks):
        for layer in self.decoder:
            layer.reset_incremental_state()
        memory, start = self.encode(source), 0
        for chunk in chunks:
            yield self.decode(chunk, memory, start=start, incremental=True)
            start += chunk.size(1)

    @torch.no_grad()
    def generate(self, source, steps, use_cache):
        tokens = torch.full((source.size(0), 1), BOS, dtype=torch.long, device=source.device)

        def last():
            while True:
                yield tokens[:, -1:]

        steps_of_cache = self.incremental(source, last())
        for _ in range(steps):
            logits = next(steps_of_cache) if use_cache else self(source, tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        return tokens


subject = Subject(
    kind="encoder_decoder",
    name="translation model",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: torch.cat(list(m.incremental(source, chunks)), dim=1),
    generate=lambda m, source, steps, use_cache: m.generate(source, steps, use_cache),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
