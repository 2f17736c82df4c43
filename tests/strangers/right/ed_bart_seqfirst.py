"""BART: post-norm, learned positions from row 2 on, norm behind the embedding, queries scaled before the product, tied weights.

Unusual: both stacks work on [T, B, D] as fairseq's BART does; the additive masks hold -inf, and a query that may see no key
at all is given the key at its own place (or, in cross-attention, all keys), which only ever concerns padding.
`final_logits_bias` is a buffer and not trained.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

OFFSET = 2


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.width, self.dropout = heads, dim // heads, dropout
        self.k_proj, self.v_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.q_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, memory, additive):
        t, b, d = x.shape
        q = self.q_proj(x) * self.width**-0.5
        q = q.reshape(t, b * self.heads, self.width).transpose(0, 1)
        k = self.k_proj(memory).reshape(-1, b * self.heads, self.width).transpose(0, 1)
        v = self.v_proj(memory).reshape(-1, b * self.heads, self.width).transpose(0, 1)
        scores = torch.bmm(q, k.transpose(1, 2))
        if additive is not None:  # [B, T or 1, S]
            scores = scores + additive.to(scores.dtype).repeat_interleave(self.heads, dim=0)
        probs = F.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
        return self.out_proj(torch.bmm(probs, v).transpose(0, 1).reshape(t, b, d))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        self.self_attn = Attention(c.d_model, c.num_heads, c.dropout)
        self.self_attn_layer_norm = nn.LayerNorm(c.d_model)
        self.encoder_attn = Attention(c.d_model, c.num_heads, c.dropout) if cross else None
        self.encoder_attn_layer_norm = nn.LayerNorm(c.d_model) if cross else None
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, additive, memory=None, memory_additive=None):
        x = self.self_attn_layer_norm(x + self.drop(self.self_attn(x, x, additive)))
        if self.encoder_attn is not None:
            x = self.encoder_attn_layer_norm(x + self.drop(self.encoder_attn(x, memory, memory_additive)))
        return self.final_layer_norm(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class Stack(nn.Module):
    def __init__(self, c, shared, cross):
        super().__init__()
        self.embed_tokens = shared
        self.embed_positions = nn.Embedding(c.max_len + OFFSET, c.d_model)
        self.layernorm_embedding = nn.LayerNorm(c.d_model)
        self.layers = nn.ModuleList([Layer(c, cross) for _ in range(c.num_layers)])
        self.drop = nn.Dropout(c.dropout)

    def forward(self, ids, *args):
        places = torch.arange(OFFSET, OFFSET + ids.size(1), device=ids.device)
        x = self.layernorm_embedding(self.embed_tokens(ids) + self.embed_positions(places))
        x = self.drop(x).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, *args)
        return x


def to_additive(seen, dtype):
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))


class Bart(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = Stack(c, self.shared, cross=False)
        self.decoder = Stack(c, self.shared, cross=True)
        self.register_buffer("final_logits_bias", torch.zeros(1, c.vocab_size))

    def forward(self, source, target, source_mask=None, target_mask=None):
        dtype, t = self.shared.weight.dtype, target.size(1)
        over_source = None
        if source_mask is not None:
            source_mask = source_mask | ~source_mask.any(dim=1, keepdim=True)
            over_source = to_additive(source_mask[:, None, :], dtype)
        memory = self.encoder(source, over_source)
        seen = torch.ones(t, t, dtype=torch.bool, device=target.device).tril().expand(target.size(0), t, t)
        if target_mask is not None:
            seen = seen & target_mask[:, None, :]
            seen = seen | torch.eye(t, dtype=torch.bool, device=target.device)
        x = self.decoder(target, to_additive(seen, dtype), memory, over_source)
        return (F.linear(x, self.shared.weight) + self.final_logits_bias).transpose(0, 1)


COMMON = dict(
    kind="encoder_decoder",
    build=Bart,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "learned",
        "position_offset": OFFSET,
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "bias": True,
        "tied": True,
    },
)
