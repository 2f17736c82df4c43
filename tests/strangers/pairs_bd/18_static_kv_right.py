"""Encoder-decoder for translation; when decoding step by step the projected memory is kept (static_kv)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.saved = None

    def reset(self):
        self.saved = None

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, source=None, seen=None, incremental=False):
        q = self.split(self.q(x))
        if incremental and source is not None and self.saved is not None and self.saved[0].size(0) == x.size(0):
            k, v = self.saved
        else:
            what = x if source is None else source
            k, v = self.split(self.k(what)), self.split(self.v(what))
            if incremental and source is None and self.saved is not None:
                k, v = torch.cat([self.saved[0], k], 2), torch.cat([self.saved[1], v], 2)
            if incremental:
                self.saved = (k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn, self.ffn = Attention(dim, heads), FeedForward(dim, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, seen):
        x = self.norm1(x + self.attn(x, seen=seen))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(dim, heads), Attention(dim, heads)
        self.ffn = FeedForward(dim, hidden)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, memory, seen, memory_seen, incremental=False):
        x = self.norm1(x + self.self_attn(x, seen=seen, incremental=incremental))
        x = self.norm2(x + self.cross_attn(x, memory, memory_seen, incremental=incremental))
        return self.norm3(x + self.ffn(x))


class Translator(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, depth, max_len):
        super().__init__()
        self.embed, self.pos_src, self.pos_tgt = (nn.Embedding(n, dim) for n in (vocab, max_len, max_len))
        self.encoder = nn.ModuleList([EncoderLayer(dim, heads, hidden) for _ in range(depth)])
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads, hidden) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab, bias=False)

    def encode(self, source, source_mask=None):
        x = self.embed(source) + self.pos_src(torch.arange(source.shape[1], device=source.device))
        seen = None if source_mask is None else self.keys(source_mask)
        for layer in self.encoder:
            x = layer(x, seen)
        return x

    @staticmethod
    def keys(mask):
        """[B, S] -> [B, 1, 1, S]; a sample without one real position sees all of itself, so that nothing is NaN."""
        return (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]

    def decode(self, target, memory, source_mask=None, target_mask=None, start=0, incremental=False):
        t = target.shape[1]
        x = self.embed(target) + self.pos_tgt(torch.arange(start, start + t, device=target.device))
        seen = torch.ones(t, start + t, dtype=torch.bool, device=target.device).tril(start)
        if target_mask is not None:
            itself = torch.eye(t, dtype=torch.bool, device=target.device)
            seen = seen & (target_mask[:, None, None, :] | itself)
        memory_seen = None if source_mask is None else self.keys(source_mask)
        for layer in self.decoder:
            x = layer(x, memory, seen, memory_seen, incremental)
        return self.head(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)

    @torch.no_grad()
    def decode_in_steps(self, source, chunks):
        for layer in self.decoder:
            layer.self_attn.reset()
            layer.cross_attn.reset()
        memory, start, outputs = self.encode(source), 0, []
        for chunk in chunks:
            outputs.append(self.decode(chunk, memory, start=start, incremental=True))
            start += chunk.shape[1]
        return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    cache=lambda model, source, chunks: model.decode_in_steps(source, chunks),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
        "tied": False,
        "output_bias": False,
    },
)
