WHAT = "In cached decoding of the encoder-decoder the past length is read off entry 2 of the layer's cache (cross-attention keys, the source's length) instead of entry 0 (self-attention keys), so later chunks get wrong positions."
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def shape(self, x):
        return x.view(x.size(0), x.size(1), self.h, -1).transpose(1, 2)

    def keys_values(self, x):
        return self.shape(self.k_proj(x)), self.shape(self.v_proj(x))

    def forward(self, x, k, v, mask):
        q = self.shape(self.q_proj(x))
        w = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
        w = w.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out_proj((w @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, d, ff):
        super().__init__(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn, self.ffn = Attention(d, h), FeedForward(d, ff)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        x = self.norm1(x + self.self_attn(x, *self.self_attn.keys_values(x), mask))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn, self.cross_attn, self.ffn = Attention(d, h), Attention(d, h), FeedForward(d, ff)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, memory, self_mask, cross_mask, past=None):
        k, v = self.self_attn.keys_values(x)
        if past is None:
            ck, cv = self.cross_attn.keys_values(memory)
        else:
            k, v, ck, cv = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2), past[2], past[3]
        x = self.norm1(x + self.self_attn(x, k, v, self_mask))
        x = self.norm2(x + self.cross_attn(x, ck, cv, cross_mask))
        return self.norm3(x + self.ffn(x)), (k, v, ck, cv)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, h, layers, ff):
        super().__init__()
        self.shared, self.d = nn.Embedding(vocab, d), d
        self.encoder = nn.ModuleList(EncoderLayer(d, h, ff) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, h, ff) for _ in range(layers))
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def embed(self, ids, start=0):
        position = torch.arange(start, start + ids.size(1), device=ids.device, dtype=torch.float64)
        freq = 10000.0 ** (-torch.arange(0, self.d, 2, device=ids.device, dtype=torch.float64) / self.d)
        angle = position[:, None] * freq
        table = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
        x = self.shared(ids)
        return x + table.to(x.dtype)

    def encode(self, source, mask):
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return x

    def decode(self, target, memory, cross_mask, target_mask=None, past=None):
        past_length = past[0][2].shape[2] if past is not None else 0
        x = self.embed(target, past_length)
        T, S = target.size(1), target.size(1) + (past[0][0].shape[2] if past is not None else 0)
        mask = torch.ones(T, S, dtype=torch.bool, device=target.device).tril(S - T)[None, None]
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        present = []
        for i, layer in enumerate(self.decoder):
            x, kv = layer(x, memory, mask, cross_mask, None if past is None else past[i])
            present.append(kv)
        return self.lm_head(x), present

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        seen = source_mask[:, None, None, :]
        return self.decode(target, self.encode(source, seen), seen, target_mask)[0]


def cached(model, source, chunks):
    seen = torch.ones_like(source, dtype=torch.bool)[:, None, None, :]
    memory, past, outputs = model.encode(source, seen), None, []
    for chunk in chunks:
        y, past = model.decode(chunk, memory, seen, past=past)
        outputs.append(y)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq with cache",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cached,
    mask_forms=("padding",),
    domain={"d_model": [8, 16, 32], "num_heads": [1, 2, 4]},
    declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "post",
              "activation": "relu", "padding_side": "right"},
)
