"""Encoder-decoder whose decoder caches: its own keys and values grow, those of the memory are made once."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def keys_values(self, memory):
        B, S, _ = memory.shape
        return self.kv(memory).view(B, S, 2, self.heads, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x, keys_values, allowed=None):
        B, T, D = x.shape
        q = self.q(x).view(B, T, self.heads, -1).transpose(1, 2)
        scores = q @ keys_values[0].transpose(-1, -2) / q.shape[-1] ** 0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ keys_values[1]).transpose(1, 2).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, c, cross, index):
        super().__init__()
        self.index = index
        self.norm_1, self.attention = nn.LayerNorm(c.d_model), Attention(c.d_model, c.num_heads)
        self.norm_2, self.cross = (nn.LayerNorm(c.d_model), Attention(c.d_model, c.num_heads)) if cross else (None, None)
        self.norm_3 = nn.LayerNorm(c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, allowed=None, memory=None, memory_allowed=None, cache=None):
        y = self.norm_1(x)
        own = self.attention.keys_values(y)
        if cache is not None:
            own = torch.cat([cache[self.index, "self"], own], dim=3) if (self.index, "self") in cache else own
            cache[self.index, "self"] = own
        x = x + self.attention(y, own, allowed)
        if self.cross is not None:
            if cache is None:
                theirs = self.cross.keys_values(memory)
            else:
                name = (self.index, "cross")
                if name not in cache:
                    cache[name] = self.cross.keys_values(memory)
                theirs = cache[name]
            x = x + self.cross(self.norm_2(x), theirs, memory_allowed)
        return x + self.down(F.relu(self.up(self.norm_3(x))))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList([Layer(c, False, i) for i in range(c.num_layers)])
        self.decoder = nn.ModuleList([Layer(c, True, i) for i in range(c.num_layers)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def embed(self, tokens, start=0):
        return self.shared(tokens) + self.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))

    def encode(self, source, source_mask=None):
        allowed = None if source_mask is None else source_mask[:, None, None]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return self.encoder_norm(x), allowed

    def decode(self, target, memory, memory_allowed, target_mask=None, cache=None, start=0):
        n, S = target.shape[1], start + target.shape[1]
        allowed = torch.ones(n, S, dtype=torch.bool, device=target.device).tril(start)
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None]
        x = self.embed(target, start)
        for layer in self.decoder:
            x = layer(x, allowed, memory, memory_allowed, cache)
        return self.head(self.decoder_norm(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, memory_allowed = self.encode(source, source_mask)
        return self.decode(target, memory, memory_allowed, target_mask)


def cached(model, source, chunks):
    memory, _ = model.encode(source)
    outputs, cache, start = [], {}, 0
    for chunk in chunks:
        outputs.append(model.decode(chunk, memory, None, None, cache, start))
        start += chunk.shape[1]
    return outputs


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq with a cache",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cached,
    declares={"positions": "learned", "norm_placement": "pre", "activation": "relu", "padding_side": "right"},
)
