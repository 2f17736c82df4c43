WHAT = "The state of incremental decoding is dropped only if the shape of the source has changed (incremental, line 102), so another source of the same shape is decoded with keys and values of the previous memory."
"""Translation model of "Attention is all you need" with incremental decoding: keys and values of the memory are computed once."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(start, end, width, like):
    t = torch.arange(start, end, dtype=torch.float64, device=like.device)[:, None]
    i = torch.arange(0, width, 2, dtype=torch.float64, device=like.device)
    angles = t * 10000.0 ** (-i / width)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width].to(like.dtype)


class MultiHead(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        self.h = h
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def keys_values(self, x):
        return self.heads(self.w_k(x)), self.heads(self.w_v(x))

    def forward(self, x, keys, values, allowed=None):
        q = self.heads(self.w_q(x))
        scores = q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.w_o((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, d_model, d_ff):
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.attn, self.ff = MultiHead(d_model, h), FeedForward(d_model, d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, allowed):
        x = self.norm1(x + self.attn(x, *self.attn.keys_values(x), allowed))
        return self.norm2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.attn, self.cross, self.ff = MultiHead(d_model, h), MultiHead(d_model, h), FeedForward(d_model, d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, y, keys, values, allowed, memory, memory_allowed):
        y = self.norm1(y + self.attn(y, keys, values, allowed))
        y = self.norm2(y + self.cross(y, *memory, memory_allowed))
        return self.norm3(y + self.ff(y))


class Translator(nn.Module):
    def __init__(self, vocab, d_model, h, n, d_ff):
        super().__init__()
        self.d_model = d_model
        self.source_embed, self.target_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, h, d_ff) for _ in range(n))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, h, d_ff) for _ in range(n))
        self.generator = nn.Linear(d_model, vocab, bias=False)
        self.state = {}

    def embed(self, table, tokens, start=0):
        x = table(tokens) * math.sqrt(self.d_model)
        return x + sinusoids(start, start + tokens.shape[1], self.d_model, x)

    def encode(self, source, allowed=None):
        x = self.embed(self.source_embed, source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return x

    def forward(self, source, target, source_mask=None, target_mask=None):
        seen = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.encode(source, seen)
        T = target.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        y = self.embed(self.target_embed, target)
        for layer in self.decoder:
            y = layer(y, *layer.attn.keys_values(y), allowed, layer.cross.keys_values(memory), seen)
        return self.generator(y)

    @torch.no_grad()
    def incremental(self, source, chunks):
        key = (source.shape, self.generator.weight.dtype)
        if self.state.get("key") != key:
            self.state = {"key": key}
        start, outputs = 0, []
        for chunk in chunks:
            y = self.embed(self.target_embed, chunk, start)
            T, S = chunk.shape[1], start + chunk.shape[1]
            allowed = torch.ones(T, S, dtype=torch.bool, device=chunk.device).tril(start)
            for i, layer in enumerate(self.decoder):
                if ("memory", i) not in self.state:
                    if "encoded" not in self.state:
                        self.state["encoded"] = self.encode(source)
                    self.state["memory", i] = layer.cross.keys_values(self.state["encoded"])
                keys, values = layer.attn.keys_values(y)
                if start:
                    past_keys, past_values = self.state["self", i]
                    keys, values = torch.cat((past_keys, keys), 2), torch.cat((past_values, values), 2)
                self.state["self", i] = keys, values
                y = layer(y, keys, values, allowed, self.state["memory", i], None)
            outputs.append(self.generator(y))
            start = S
        return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    declares={
        "causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "post",
        "final_norm": False, "activation": "relu", "embedding_scale": True, "tied": False, "padding_side": "right",
    },
)
