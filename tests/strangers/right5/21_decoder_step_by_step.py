WHAT = "an encoder-decoder whose forward decodes token by token with lists of past keys and values; the encoder is channels-first [B, D, T] with 1x1 convolutions, post-norm, sinusoids counted from the masks"
import math

import torch
from torch import nn


class Attend(nn.Module):
    """One query vector [B, D] per call, keys and values in lists."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def remember(self, y):
        return self.k(y).unflatten(-1, (self.h, -1)), self.v(y).unflatten(-1, (self.h, -1))

    def forward(self, x, keys, values, seen):  # keys: n times [B, h, K]; seen [B, n]
        q = self.q(x).unflatten(-1, (self.h, -1))
        s = torch.stack([(q * k).sum(-1) for k in keys], -1) / math.sqrt(q.shape[-1])
        w = s.masked_fill(~seen[:, None], torch.finfo(s.dtype).min).softmax(-1)
        return self.o(sum(w[..., i, None] * v for i, v in enumerate(values)).flatten(1))


class EncoderLayer(nn.Module):  # [B, D, T] and convolutions of width 1
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.qkv, self.o = nn.Conv1d(d, 3 * d, 1), nn.Conv1d(d, d, 1)
        self.up, self.down = nn.Conv1d(d, ff, 1), nn.Conv1d(ff, d, 1)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        B, D, T = x.shape
        q, k, v = self.qkv(x).view(B, 3, self.h, D // self.h, T).unbind(1)
        s = torch.einsum("bhct,bhcs->bhst", q, k) / math.sqrt(D // self.h)  # keys before queries
        w = s.masked_fill(~mask[:, None, :, None], torch.finfo(s.dtype).min).softmax(2)
        y = self.o(torch.einsum("bhcs,bhst->bhct", v, w).reshape(B, D, T))
        x = self.n1((x + y).transpose(1, 2)).transpose(1, 2)
        return self.n2((x + self.down(torch.relu(self.up(x)))).transpose(1, 2)).transpose(1, 2)


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.own, self.cross = Attend(d, h), Attend(d, h)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, past, seen, memory, memory_seen):
        k, v = self.own.remember(x)
        past[0].append(k)
        past[1].append(v)
        x = self.n1(x + self.own(x, past[0], past[1], seen))
        x = self.n2(x + self.cross(x, memory[0], memory[1], memory_seen))
        return self.n3(x + self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    def __init__(self, vocab, d, h, layers, ff):
        super().__init__()
        self.d, self.table = d, nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList(EncoderLayer(d, h, ff) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, h, ff) for _ in range(layers))
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=d**-0.5)

    def embed(self, ids, mask):
        at = (mask.long().cumsum(1) - 1).clamp(min=0).double()[..., None]
        i = torch.arange(self.d, device=ids.device)
        a = at * 10000.0 ** (-(i - i % 2).double() / self.d)
        return self.table(ids) * math.sqrt(self.d) + torch.where(i % 2 == 0, a.sin(), a.cos()).to(self.table.weight.dtype)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        target_mask = torch.ones_like(target, dtype=torch.bool) if target_mask is None else target_mask
        x = self.embed(source, source_mask).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x, source_mask)
        states = x.transpose(1, 2).unbind(1)
        memory = []
        for layer in self.decoder:
            pairs = [layer.cross.remember(s) for s in states]
            memory.append(([k for k, _ in pairs], [v for _, v in pairs]))
        past, out = [([], []) for _ in self.decoder], []
        for t, y in enumerate(self.embed(target, target_mask).unbind(1)):
            for i, layer in enumerate(self.decoder):
                y = layer(y, past[i], target_mask[:, : t + 1], memory[i], source_mask)
            out.append(self.head(y))
        return torch.stack(out, 1)


from veriformer.properties import Subject


def build(c):
    return Model(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff)


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, source_mask, target_mask)


undeclared = Subject(kind="encoder_decoder", build=build, forward=forward)
declared = Subject(
    kind="encoder_decoder", name="step by step", build=build, forward=forward,
    declares={"positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "norm": "layer",
              "norm_placement": "post", "final_norm": False, "activation": "relu", "tied": True, "bias": True,
              "output_bias": False, "padding_side": "both", "beyond_max_len": "works"},
)
