"""fairseq-like encoder, [T, B, C] inside, with activation checkpointing of every layer in training."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class TransformerEncoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim, dropout):
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.scaling = (embed_dim // num_heads) ** -0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def self_attn(self, x, encoder_padding_mask):
        tgt_len, bsz, _ = x.size()
        shape = (tgt_len, bsz * self.num_heads, self.embed_dim // self.num_heads)
        q = (self.q_proj(x) * self.scaling).contiguous().view(shape).transpose(0, 1)
        k = self.k_proj(x).contiguous().view(shape).transpose(0, 1)
        v = self.v_proj(x).contiguous().view(shape).transpose(0, 1)
        w = torch.bmm(q, k.transpose(1, 2))
        if encoder_padding_mask is not None:
            w = w.view(bsz, self.num_heads, tgt_len, tgt_len)
            w = w.masked_fill(encoder_padding_mask[:, None, None, :], torch.finfo(w.dtype).min)
            w = w.view(bsz * self.num_heads, tgt_len, tgt_len)
        w = F.dropout(F.softmax(w, dim=-1), self.dropout, self.training)
        attn = torch.bmm(w, v).transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(attn)

    def forward(self, x, encoder_padding_mask=None):
        residual = x
        x = self.self_attn(self.self_attn_layer_norm(x), encoder_padding_mask)
        x = residual + F.dropout(x, self.dropout, self.training)
        residual = x
        x = F.relu(self.fc1(self.final_layer_norm(x)))
        x = self.fc2(F.dropout(x, self.dropout, self.training))
        return residual + F.dropout(x, self.dropout, self.training)


class TransformerEncoder(nn.Module):
    def __init__(self, vocab, embed_dim, num_heads, layers, ffn_dim, max_len, dropout, checkpoint_activations=True):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, embed_dim)
        self.embed_positions = nn.Embedding(max_len, embed_dim)
        self.embed_scale = math.sqrt(embed_dim)
        self.checkpoint_activations = checkpoint_activations
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(embed_dim, num_heads, ffn_dim, dropout) for _ in range(layers)
        )
        self.layer_norm = nn.LayerNorm(embed_dim)

    def run_layer(self, layer, x, padding):
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            return checkpoint(layer, x, padding, use_reentrant=False, preserve_rng_state=True)
        return layer(x, padding)

    def forward(self, src_tokens, encoder_padding_mask=None):
        positions = torch.arange(src_tokens.size(1), device=src_tokens.device)
        x = self.embed_tokens(src_tokens) * self.embed_scale + self.embed_positions(positions)
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = self.run_layer(layer, x, encoder_padding_mask)
        return self.layer_norm(x).transpose(0, 1)


def build(c):
    return TransformerEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


subject = Subject(
    kind="encoder",
    name="fairseq encoder with checkpointed layers",
    build=build,
    forward=lambda model, tokens, attention_mask=None: model(
        tokens, None if attention_mask is None else ~attention_mask
    ),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "right",
    },
)
