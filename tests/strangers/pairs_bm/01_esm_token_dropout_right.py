"""A small ESM-2: protein language model with token dropout (Lin et al.), rotary positions, pre-LN."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

MASK_IDX = 2
TRAIN_RATIO = 0.15 * 0.8


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary(x):
    T, K = x.shape[-2:]
    inv = 10000.0 ** (-torch.arange(0, K, 2, dtype=x.dtype, device=x.device) / K)
    angles = torch.arange(T, dtype=x.dtype, device=x.device)[:, None] * inv
    angles = torch.cat((angles, angles), dim=-1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


class EsmLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.heads = heads
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn)
        self.fc2 = nn.Linear(ffn, dim)

    def attend(self, x, keep):
        B, T, D = x.shape
        q, k, v = (p(x).view(B, T, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = apply_rotary(q) @ apply_rotary(k).transpose(-1, -2) / math.sqrt(D // self.heads)
        scores = scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))

    def forward(self, x, keep):
        x = x + self.attend(self.self_attn_layer_norm(x), keep)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class ESM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("rotary positions need an even head width")
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([EsmLayer(dim, heads, ffn) for _ in range(layers)])
        self.emb_layer_norm_after = nn.LayerNorm(dim)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embed_tokens(tokens)
        # token dropout: hidden residues contribute nothing, and the rest is scaled as it was in training
        hidden = tokens.eq(MASK_IDX)
        x = x.masked_fill(hidden[..., None], 0.0)
        lengths = attention_mask.sum(-1)
        seen = lengths - (hidden & attention_mask).sum(-1)
        factor = (1 - TRAIN_RATIO) * lengths.to(x.dtype) / seen.clamp(min=1).to(x.dtype)
        x = x * factor[:, None, None]
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.emb_layer_norm_after(x)


subject = Subject(
    kind="encoder",
    name="esm",
    build=lambda c: ESM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "rotary", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "bias": True, "padding_side": "both"},
)
