"""A BERT-like encoder ported from a lax.scan: the carry goes through the blocks, the scan also collects the hidden states."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    def __init__(self, features, heads, mlp_dim):
        super().__init__()
        self.heads = heads
        self.ln_attn, self.ln_mlp = nn.LayerNorm(features, eps=1e-6), nn.LayerNorm(features, eps=1e-6)
        self.qkv = nn.Linear(features, 3 * features)
        self.proj = nn.Linear(features, features)
        self.wi, self.wo = nn.Linear(features, mlp_dim), nn.Linear(mlp_dim, features)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_attn(x)).reshape(b, t, 3, self.heads, d // self.heads).unbind(2)
        logits = torch.einsum("bqhd,bkhd->bhqk", q / math.sqrt(d // self.heads), k)
        if mask is not None:
            logits = torch.where(mask[:, None, None, :], logits, torch.finfo(logits.dtype).min)
        y = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.wo(F.gelu(self.wi(self.ln_mlp(x))))


class FlaxEncoder(nn.Module):
    def __init__(self, vocab, features, heads, layers, mlp_dim, max_len):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, features), nn.Embedding(max_len, features)
        self.blocks = nn.ModuleList([EncoderBlock(features, heads, mlp_dim) for _ in range(layers)])
        self.encoder_norm = nn.LayerNorm(features, eps=1e-6)

    def scan(self, x, mask):
        states = [x]
        for block in self.blocks:
            x = block(x, mask)
            states.append(x)
        return states

    def forward(self, tokens, mask=None):
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        states = self.scan(x, mask)
        return self.encoder_norm(states[-1])


subject = Subject(
    kind="encoder",
    name="encoder from a scan",
    build=lambda c: FlaxEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm_placement": "pre", "padding_side": "right"},
)
