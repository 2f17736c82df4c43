"""A fairseq-like encoder: time first inside, heads folded into the batch, positions that count real tokens."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the padding mask is tiled over the heads (repeat) where batch * heads runs with the sample outermost"
CAUSE = (
    "The padding mask is repeated for the heads in the wrong order (repeat instead of repeat_interleave), so that a "
    "head of one sample is masked by the mask of another sample."
)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def per_head(self, padding):
        return padding.repeat_interleave(self.num_heads, dim=0)

    def forward(self, x, padding):
        T, B, D = x.shape
        q = self.q_proj(x) * self.scaling
        k, v = self.k_proj(x), self.v_proj(x)
        q, k, v = (t.contiguous().view(T, B * self.num_heads, self.head_dim).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2))
        if padding is not None:
            hidden = self.per_head(padding)[:, None, :]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1)
        y = torch.bmm(weights, v).transpose(0, 1).contiguous().view(T, B, D)
        return self.out_proj(y)


class TiledMultiheadAttention(MultiheadAttention):
    def per_head(self, padding):
        return padding.repeat(self.num_heads, 1)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden, attention):
        super().__init__()
        self.self_attn = attention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, padding):
        residual = x
        x = residual + self.self_attn(self.self_attn_layer_norm(x), padding)
        residual = x
        return residual + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class TransformerEncoder(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            [EncoderLayer(c.d_model, c.num_heads, c.d_ff, attention) for _ in range(c.num_layers)]
        )
        self.layer_norm = nn.LayerNorm(c.d_model)

    def forward(self, src_tokens, padding=None):
        real = torch.ones_like(src_tokens) if padding is None else (~padding).long()
        positions = (real.cumsum(1) - 1).clamp(min=0)
        x = (self.embed_tokens(src_tokens) + self.embed_positions(positions)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding)
        return self.layer_norm(x).transpose(0, 1)


def subject(attention):
    return Subject(
        kind="encoder",
        name="fairseq encoder",
        build=lambda c: TransformerEncoder(c, attention),
        forward=lambda model, tokens, attention_mask=None: model(
            tokens, None if attention_mask is None else ~attention_mask.bool()
        ),
    )


right = subject(MultiheadAttention)
wrong = subject(TiledMultiheadAttention)
