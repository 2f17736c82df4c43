"""Encoder-decoder in the manner of fairseq, with incremental state."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, name, embed_dim, num_heads):
        super().__init__()
        self.name, self.num_heads, self.head_dim = name, num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def _heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, hide=None, state=None, static_kv=False):
        q = self._heads(self.q_proj(query)) * self.head_dim**-0.5
        saved = None if state is None else state.get(self.name)
        if static_kv and saved is not None and saved[0].size(0) == key.size(0) and saved[0].size(2) == key.size(1):
            k, v = saved
        else:
            k, v = self._heads(self.k_proj(key)), self._heads(self.v_proj(key))
            if saved is not None and not static_kv:
                k, v = torch.cat([saved[0], k], dim=2), torch.cat([saved[1], v], dim=2)
        if state is not None:
            state[self.name] = (k, v)
        attn_weights = torch.matmul(q, k.transpose(2, 3))
        if hide is not None:
            attn_weights = attn_weights.masked_fill(hide, float("-inf"))
        attn = torch.matmul(torch.softmax(attn_weights, dim=-1), v)
        return self.out_proj(attn.transpose(1, 2).reshape(query.size()))


class FeedForward(nn.Sequential):
    def __init__(self, d, ff):
        super().__init__(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn, self.ffn = MultiheadAttention("encoder", d, h), FeedForward(d, ff)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, hide):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, hide))
        return self.final_layer_norm(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, i, d, h, ff):
        super().__init__()
        self.self_attn = MultiheadAttention(f"{i}.self", d, h)
        self.encoder_attn = MultiheadAttention(f"{i}.cross", d, h)
        self.ffn = FeedForward(d, ff)
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(3)])

    def forward(self, x, memory, ahead, hide, state):
        x = self.norms[0](x + self.self_attn(x, x, ahead, state))
        x = self.norms[1](x + self.encoder_attn(x, memory, hide, state, static_kv=True))
        return self.norms[2](x + self.ffn(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = self.d = c.d_model
        self.source_embed, self.target_embed = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.source_place, self.target_place = nn.Embedding(c.max_len, d), nn.Embedding(c.max_len, d)
        self.encoder = nn.ModuleList([EncoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(i, d, c.num_heads, c.d_ff) for i in range(c.num_layers)])
        self.output = nn.Linear(d, c.vocab_size)
        self.incremental_state = {}

    def encode(self, source, hide):
        x = self.source_embed(source) * math.sqrt(self.d) + self.source_place.weight[: source.size(1)]
        for layer in self.encoder:
            x = layer(x, hide)
        return x

    def decode(self, target, memory, hide, state=None, start=0):
        T = target.size(1)
        x = self.target_embed(target) * math.sqrt(self.d) + self.target_place.weight[start : start + T]
        ahead = torch.ones(T, start + T, dtype=torch.bool, device=target.device).triu(start + 1)
        for layer in self.decoder:
            x = layer(x, memory, ahead, hide, state)
        return self.output(x)

    def forward(self, source, target, source_mask=None):
        hide = None if source_mask is None else ~source_mask[:, None, None, :]
        return self.decode(target, self.encode(source, hide), hide)

    def begin(self):
        """Before the first token of a sentence."""
        for name in list(self.incremental_state):
            del self.incremental_state[name]

    @torch.no_grad()
    def incremental(self, source, chunks):
        self.begin()
        memory, start, outs = self.encode(source, None), 0, []
        for chunk in chunks:
            outs.append(self.decode(chunk, memory, None, self.incremental_state, start))
            start += chunk.size(1)
        return torch.cat(outs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="fairseq-like encoder-decoder",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None: m(source, target, source_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    mask_forms=("padding",),
    declares={
        "positions": "learned",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "padding_side": "right",
    },
)
