WHAT = 'the cache counts calls, not tokens (line 102): after a chunk of several target tokens the learned positions of the next chunk begin too early'
"""A small BART: learned positions, post-LN, one embedding for source, target and output; target decoded with a cache."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Cache:
    """Keys and values of the target so far, layer by layer, and how many tokens they are of."""

    def __init__(self, layers):
        self.length = 0
        self.states = [None] * layers

    def extend(self, layer, k, v):
        if self.states[layer] is not None:
            k = torch.cat([self.states[layer][0], k], dim=2)
            v = torch.cat([self.states[layer][1], v], dim=2)
        self.states[layer] = (k, v)
        return k, v


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory, bias=None, cache=None, layer=0):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(memory)), self.split(self.v_proj(memory))
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores.masked_fill(bias, torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn, self.self_attn_norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.final_norm = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)

    def forward(self, x, hidden):
        x = self.self_attn_norm(x + self.self_attn(x, x, hidden))
        return self.final_norm(x + self.fc2(F.gelu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn, self.self_attn_norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.encoder_attn, self.encoder_attn_norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.final_norm = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)

    def forward(self, x, memory, hidden, memory_hidden, cache, layer):
        x = self.self_attn_norm(x + self.self_attn(x, x, hidden, cache, layer))
        x = self.encoder_attn_norm(x + self.encoder_attn(x, memory, memory_hidden))
        return self.final_norm(x + self.fc2(F.gelu(self.fc1(x))))


class Bart(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.shared = nn.Embedding(vocab, dim)
        self.encoder_positions, self.decoder_positions = nn.Embedding(max_len, dim), nn.Embedding(max_len, dim)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, hidden) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, hidden) for _ in range(layers))
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.shared.weight

    def encode(self, source, source_mask=None):
        positions = torch.arange(source.shape[1], device=source.device)
        x = self.encoder_norm(self.shared(source) + self.encoder_positions(positions))
        hidden = None if source_mask is None else ~source_mask[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, hidden)
        return x

    def decode(self, target, memory, source_mask=None, target_mask=None, cache=None):
        past = 0 if cache is None else cache.length
        positions = past + torch.arange(target.shape[1], device=target.device)
        seen = torch.arange(target.shape[1], device=target.device)[:, None]
        if cache is not None and cache.states[0] is not None:
            seen = seen + cache.states[0][0].shape[2]
        hidden = torch.arange(int(seen[-1]) + 1, device=target.device)[None, :] > seen
        if target_mask is not None:
            hidden = hidden | ~target_mask[:, None, None, :]
        memory_hidden = None if source_mask is None else ~source_mask[:, None, None, :]
        x = self.decoder_norm(self.shared(target) + self.decoder_positions(positions))
        for number, layer in enumerate(self.decoder):
            x = layer(x, memory, hidden, memory_hidden, cache, number)
        if cache is not None:
            cache.length += 1
        return self.lm_head(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)


def cached(model, source, chunks):
    memory, cache = model.encode(source), Cache(len(model.decoder))
    return torch.cat([model.decode(chunk, memory, cache=cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="small BART",
    build=lambda c: Bart(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cached,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "padding_side": "right",
    },
)
