WHAT = 'The decoder loop overwrites the source mask with None after the first layer, so that deeper layers cross-attend to source padding (line 79)'
import math
import torch
from torch import nn
from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, key_padding_mask=None, attn_mask=None):
        b, t, e = query.shape
        s = key.size(1)
        q = self.q_proj(query).view(b, t, self.num_heads, -1) * self.head_dim ** -0.5
        k = self.k_proj(key).view(b, s, self.num_heads, -1)
        v = self.v_proj(key).view(b, s, self.num_heads, -1)
        w = torch.einsum("bthd,bshd->bhts", q, k)
        if attn_mask is not None:
            w = w.masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            w = w.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        return self.out_proj(torch.einsum("bhts,bshd->bthd", w.softmax(-1), v).reshape(b, t, e))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn = MultiheadAttention(d, h)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, pad):
        x = self.n1(x + self.self_attn(x, x, pad))
        return self.n2(x + self.fc2(torch.relu(self.fc1(x))))


class DecoderLayer(EncoderLayer):
    def __init__(self, d, h, ff):
        super().__init__(d, h, ff)
        self.encoder_attn, self.n3 = MultiheadAttention(d, h), nn.LayerNorm(d)

    def forward(self, x, memory, memory_pad, pad, future):
        x = self.n1(x + self.self_attn(x, x, pad, future))
        x = self.n3(x + self.encoder_attn(x, memory, memory_pad))
        return self.n2(x + self.fc2(torch.relu(self.fc1(x)))), None


def sinusoid(t, d):
    half = torch.exp(torch.arange(0, d, 2).float() * -(math.log(10000.0) / d))
    ang = torch.arange(t).float()[:, None] * half
    return torch.stack((ang.sin(), ang.cos()), -1).flatten(1)[:, :d]


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, h, ff = c.d_model, c.num_heads, c.d_ff
        self.src, self.tgt = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.encoder = nn.ModuleList([EncoderLayer(d, h, ff) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(d, h, ff) for _ in range(c.num_layers)])
        self.out = nn.Linear(d, c.vocab_size)

    def embed(self, table, ids):
        x = table(ids) * math.sqrt(table.embedding_dim)
        return x + sinusoid(ids.size(1), x.size(-1)).to(x)

    def forward(self, source, target, source_pad=None, target_pad=None):
        memory = self.embed(self.src, source)
        for layer in self.encoder:
            memory = layer(memory, source_pad)
        t = target.size(1)
        future = torch.ones(t, t, dtype=torch.bool, device=target.device).triu(1)
        x = self.embed(self.tgt, target)
        for layer in self.decoder:
            x, source_pad = layer(x, memory, source_pad, target_pad, future)
        return self.out(x)


def flip(mask):
    return None if mask is None else ~mask


subject = Subject(
    kind="encoder_decoder", name="fairseq", build=Transformer,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, flip(source_mask), flip(target_mask)),
    domain={"d_model": [8, 16], "num_heads": [2, 4]},
    declares={"positions": "sinusoidal", "norm": "layer", "norm_placement": "post", "activation": "relu",
              "embedding_scale": True, "padding_side": "right"},
)
