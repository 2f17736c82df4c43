WHAT = "The static buffer of the cross-attention is filled anew only if its shape changes, so that a second source of the same shape is decoded with the keys and values of the first (line 30)."
"""Encoder-decoder whose cross-attention keeps keys and values of the source in a static buffer."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


def sinusoids(start, length, width, like):
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    angles = torch.arange(start, start + length, dtype=torch.float64, device=like.device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width].to(like.dtype)


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)
        self.buffer = None  # [2, B, H, S, K]: keys and values while decoding

    def project(self, memory):
        return self.kv(memory).view(*memory.shape[:2], 2, self.heads, -1).permute(2, 0, 3, 1, 4)

    def prefill(self, memory):
        """Cross-attention: once for a source, before its first step."""
        shape = (2, memory.shape[0], self.heads, memory.shape[1], memory.shape[2] // self.heads)
        if self.buffer is None or self.buffer.shape != shape or self.buffer.dtype != memory.dtype:
            self.buffer = self.project(memory)

    def grow(self, x):
        """Self-attention: one more step."""
        self.buffer = self.project(x) if self.buffer is None else torch.cat([self.buffer, self.project(x)], dim=3)
        return self.buffer

    def forward(self, x, pair, allowed=None):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, pair[0], pair[1], attn_mask=allowed)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(3 if cross else 2))
        self.own = Attention(c.d_model, c.num_heads)
        self.cross = Attention(c.d_model, c.num_heads) if cross else None
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, allowed=None, memory=None, memory_mask=None, cached=False):
        y = self.norms[0](x)
        x = x + self.own(y, self.own.grow(y) if cached else self.own.project(y), allowed)
        if self.cross is not None:
            pair = self.cross.buffer if cached else self.cross.project(memory)
            x = x + self.cross(self.norms[1](x), pair, memory_mask)
        return x + self.down(F.relu(self.up(self.norms[-1](x))))


class Translator(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(Layer(c, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Layer(c, True) for _ in range(c.num_layers))
        self.norm_source, self.norm_target = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def embed(self, tokens, start=0):
        x = self.tokens(tokens)
        return x + sinusoids(start, tokens.shape[1], x.shape[-1], x)

    def encode(self, source, mask):
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norm_source(x)

    def decode(self, target, memory=None, mask=None, target_mask=None, start=0, cached=False):
        rows = torch.arange(start, start + target.shape[1], device=target.device)[:, None]
        columns = torch.arange(start + target.shape[1], device=target.device)[None]
        allowed = columns <= rows
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None] | (columns == rows)
        x = self.embed(target, start)
        for layer in self.decoder:
            x = layer(x, allowed, memory, mask, cached)
        return self.head(self.norm_target(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        mask = None if source_mask is None else source_mask[:, None, None]
        return self.decode(target, self.encode(source, mask), mask, target_mask)


@torch.no_grad()
def cached(model, source, chunks):
    memory, start, outputs = model.encode(source, None), 0, []
    for layer in model.decoder:
        layer.own.buffer = None
        layer.cross.prefill(memory)
    for chunk in chunks:
        outputs.append(model.decode(chunk, start=start, cached=True))
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="translator with static cross-attention",
    build=Translator,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(source, target, source_mask, target_mask),
    cache=cached,
    declares={"positions": "sinusoidal", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)).shape)
