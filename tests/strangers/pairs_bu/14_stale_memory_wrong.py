WHAT = "cross-attention keeps the memory's keys and values over calls and reset() does not clear them, so a second source of the same shape is decoded with the first one's memory (line 63, `reset`)"
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

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def finish(self, q, k, v, mask):
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory
        return self.finish(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)), mask)

    def extend(self, x):
        """Self-attention of further tokens."""
        k, v = self.split(self.k(x)), self.split(self.v(x))
        if self.saved is not None:
            k, v = torch.cat([self.saved[0], k], 2), torch.cat([self.saved[1], v], 2)
        self.saved = k, v
        T, S = x.size(1), k.size(2)
        return self.finish(self.split(self.q(x)), k, v, torch.ones(T, S, dtype=torch.bool).tril(S - T))

    def look(self, x, memory):
        """Cross-attention: the memory is projected once."""
        if self.saved is None or self.saved[0].shape[::2] != memory.shape[:2]:
            self.saved = self.split(self.k(memory)), self.split(self.v(memory))
        return self.finish(self.split(self.q(x)), *self.saved, None)


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, mask):
        x = self.n1(x + self.attn(x, mask=mask))
        return self.n2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn, self.cross = Attention(c.d_model, c.num_heads), Attention(c.d_model, c.num_heads)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(c.d_model) for _ in range(3))

    def reset(self):
        self.attn.saved = None
        # the memory stays the same while a target is decoded

    def forward(self, x, memory, mask, memory_mask):
        x = self.n1(x + self.attn(x, mask=mask))
        x = self.n2(x + self.cross(x, memory, memory_mask))
        return self.n3(x + self.ff(x))

    def step(self, x, memory):
        x = self.n1(x + self.attn.extend(x))
        x = self.n2(x + self.cross.look(x, memory))
        return self.n3(x + self.ff(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.src, self.tgt = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.src_pos, self.tgt_pos = nn.Embedding(c.max_len, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.out = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, mask=None):
        x = self.src(source) + self.src_pos(torch.arange(source.size(1)))
        mask = None if mask is None else mask[:, None, None]
        for layer in self.encoder:
            x = layer(x, mask)
        return x

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encode(source, source_mask)
        T = target.size(1)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        if target_mask is not None:
            mask = (mask & target_mask[:, None] | torch.eye(T, dtype=torch.bool))[:, None]
        memory_mask = None if source_mask is None else source_mask[:, None, None]
        x = self.tgt(target) + self.tgt_pos(torch.arange(T))
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask)
        return self.out(x)


def incremental(model, source, chunks):
    memory, start, outputs = model.encode(source), 0, []
    for layer in model.decoder:
        layer.reset()
    for chunk in chunks:
        x = model.tgt(chunk) + model.tgt_pos(torch.arange(start, start + chunk.size(1)))
        for layer in model.decoder:
            x = layer.step(x, memory)
        outputs.append(model.out(x))
        start += chunk.size(1)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="encoder_decoder",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=incremental,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "relu"},
)
