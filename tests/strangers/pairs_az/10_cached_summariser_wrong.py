WHAT = "forget() leaves the keys and values held by cross-attention: every later source is decoded against the memory of the first (line 95)."
"""An encoder-decoder that keeps what decoding needs in its attention modules."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    """Self-attention, or attention to a memory; holds keys and values while decoding."""

    def __init__(self, width, heads, cross=False):
        super().__init__()
        self.heads, self.cross = heads, cross
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.held = None

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory=None, mask=None, decoding=False):
        q = self.split(self.query(x))
        if self.cross and decoding and self.held is not None:
            k, v = self.held
        else:
            source = memory if self.cross else x
            k, v = self.split(self.key(source)), self.split(self.value(source))
            if decoding and not self.cross and self.held is not None:
                k, v = torch.cat([self.held[0], k], 2), torch.cat([self.held[1], v], 2)
        if decoding:
            self.held = (k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attn, self.attn_ln = Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.mlp_ln = nn.LayerNorm(width)

    def forward(self, x, mask):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        return x + self.mlp(self.mlp_ln(x))


class DecoderBlock(EncoderBlock):
    def __init__(self, width, heads, hidden):
        super().__init__(width, heads, hidden)
        self.cross_attn, self.cross_attn_ln = Attention(width, heads, cross=True), nn.LayerNorm(width)

    def forward(self, x, memory, mask, memory_mask, decoding):
        x = x + self.attn(self.attn_ln(x), mask=mask, decoding=decoding)
        x = x + self.cross_attn(self.cross_attn_ln(x), memory, memory_mask, decoding=decoding)
        return x + self.mlp(self.mlp_ln(x))


class Summariser(nn.Module):
    def __init__(self, vocab, width, heads, hidden, depth, max_len):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.source_places = nn.Embedding(max_len, width)
        self.target_places = nn.Embedding(max_len, width)
        self.encoder = nn.ModuleList(EncoderBlock(width, heads, hidden) for _ in range(depth))
        self.encoder_ln = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderBlock(width, heads, hidden) for _ in range(depth))
        self.decoder_ln = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocab, bias=False)

    def encode(self, source, source_mask=None):
        x = self.tokens(source) + self.source_places(torch.arange(source.shape[1], device=source.device))
        mask = None if source_mask is None else source_mask[:, None, None, :]
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_ln(x), mask

    def decode(self, target, memory, memory_mask=None, target_mask=None, start=0, decoding=False):
        t = target.shape[1]
        x = self.tokens(target) + self.target_places(torch.arange(start, start + t, device=target.device))
        mask = torch.ones(t, start + t, dtype=torch.bool, device=target.device).tril(start)
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        for block in self.decoder:
            x = block(x, memory, mask, memory_mask, decoding)
        return self.unembed(self.decoder_ln(x))

    def forget(self):
        for module in self.modules():
            if isinstance(module, Attention) and not module.cross:
                module.held = None

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, memory_mask = self.encode(source, source_mask)
        return self.decode(target, memory, memory_mask, target_mask)

    def stepwise(self, source, chunks):
        self.forget()
        memory, _ = self.encode(source)
        outputs, start = [], 0
        for chunk in chunks:
            outputs.append(self.decode(chunk, memory, start=start, decoding=True))
            start += chunk.shape[1]
        self.forget()
        return torch.cat(outputs, 1)


subject = Subject(
    kind="encoder_decoder",
    name="summariser",
    build=lambda c: Summariser(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.stepwise(source, chunks),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
