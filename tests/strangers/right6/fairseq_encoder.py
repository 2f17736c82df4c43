"""fairseq: sequence first, positions counted from the padding mask, heads folded into the batch."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

PAD = 1


class LearnedPositionalEmbedding(nn.Embedding):
    def forward(self, padding_mask):
        real = padding_mask.logical_not().long()
        return super().forward(torch.cumsum(real, dim=1) * real + self.padding_idx)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key_padding_mask):
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query) * self.scaling
        k, v = self.k_proj(query), self.v_proj(query)
        q, k, v = (
            z.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1) for z in (q, k, v)
        )
        weights = torch.bmm(q, k.transpose(1, 2)).view(bsz, self.num_heads, tgt_len, tgt_len)
        weights = weights.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(weights.dtype).min)
        weights = F.softmax(weights.view(bsz * self.num_heads, tgt_len, tgt_len), dim=-1)
        weights = F.dropout(weights, p=self.dropout, training=self.training)
        attn = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn, dropout):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.final_layer_norm = nn.LayerNorm(dim)
        self.dropout = dropout

    def forward(self, x, padding_mask):
        residual = x
        x = self.self_attn(x, padding_mask)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = self.fc2(F.relu(self.fc1(x)))
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.final_layer_norm(residual + x)


class TransformerEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, ffn, layers, max_len, dropout):
        super().__init__()
        self.embed_scale, self.dropout = math.sqrt(dim), dropout
        self.embed_tokens = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.embed_positions = LearnedPositionalEmbedding(max_len + PAD + 1, dim, padding_idx=PAD)
        self.layers = nn.ModuleList([TransformerEncoderLayer(dim, heads, ffn, dropout) for _ in range(layers)])

    def forward(self, src_tokens, padding_mask=None):
        if padding_mask is None:
            padding_mask = torch.zeros_like(src_tokens, dtype=torch.bool)
        x = self.embed_scale * self.embed_tokens(src_tokens) + self.embed_positions(padding_mask)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0)
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding_mask)
        return x.transpose(0, 1)


def build(c: DrawnConfig):
    return TransformerEncoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, None if attention_mask is None else ~attention_mask.bool())


declared = Subject(
    kind="encoder", name="fairseq encoder", build=build, forward=forward,
    declares={
        "causal": False, "positions": "learned", "position_offset": 2, "padding_idx": 1, "embedding_scale": True,
        "norm": "layer", "norm_placement": "post", "residual": True, "activation": "relu", "bias": True,
        "padding_side": "both", "beyond_max_len": "error", "attention_scale": "1/sqrt(d_head)",
    },
)
undeclared = Subject(kind="encoder", build=build, forward=forward)
