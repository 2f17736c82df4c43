"""BART (Lewis et al. 2020): post-LN encoder and decoder, learned positions from index 2 on, a norm of the embeddings."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class LearnedPositionalEmbedding(nn.Embedding):
    """The table has two rows more than there are positions, and the first position is row 2."""

    offset = 2

    def __init__(self, max_len, dim):
        super().__init__(max_len + self.offset, dim)

    def forward(self, length):
        return super().forward(torch.arange(length, device=self.weight.device) + self.offset)


class BartAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.scaling = (dim // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, memory=None, allowed=None):
        B, T, D = x.shape
        memory = x if memory is None else memory
        q = self.q_proj(x).view(B, T, self.heads, -1).transpose(1, 2) * self.scaling
        k = self.k_proj(memory).view(B, memory.shape[1], self.heads, -1).transpose(1, 2)
        v = self.v_proj(memory).view(B, memory.shape[1], self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-1, -2)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out_proj((probs @ v).transpose(1, 2).reshape(B, T, D))


class BartLayer(nn.Module):
    def __init__(self, dim, heads, ffn, dropout, is_decoder):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = BartAttention(dim, heads, dropout), nn.LayerNorm(dim)
        self.is_decoder = is_decoder
        if is_decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = BartAttention(dim, heads, dropout), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(dim, ffn), nn.Linear(ffn, dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, allowed=allowed)))
        if self.is_decoder:
            attended = self.encoder_attn(x, memory, allowed=memory_allowed)
            x = self.encoder_attn_layer_norm(x + self.dropout(attended))
        return self.final_layer_norm(x + self.dropout(self.fc2(F.gelu(self.fc1(x)))))


class BartStack(nn.Module):
    def __init__(self, shared, dim, heads, layers, ffn, max_len, dropout, is_decoder):
        super().__init__()
        self.embed_tokens = shared
        self.embed_positions = LearnedPositionalEmbedding(max_len, dim)
        self.layernorm_embedding = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([BartLayer(dim, heads, ffn, dropout, is_decoder) for _ in range(layers)])
        self.dropout, self.is_decoder = nn.Dropout(dropout), is_decoder

    def forward(self, tokens, mask=None, memory=None, memory_mask=None):
        T = tokens.shape[1]
        x = self.dropout(self.layernorm_embedding(self.embed_tokens(tokens) + self.embed_positions(T)))
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device)[None, None]
        if self.is_decoder:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask.bool()[:, None, None, :]
        memory_allowed = None if memory_mask is None else memory_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed, memory, memory_allowed)
        return x


class Bart(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, ffn, max_len, dropout):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, dim)
        self.encoder = BartStack(self.shared, dim, heads, layers, ffn, max_len, dropout, is_decoder=False)
        self.decoder = BartStack(self.shared, dim, heads, layers, ffn, max_len, dropout, is_decoder=True)
        self.register_buffer("final_logits_bias", torch.zeros(1, vocab_size))

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(source, source_mask)
        y = self.decoder(target, target_mask, memory, source_mask)
        return F.linear(y, self.shared.weight) + self.final_logits_bias


subject = Subject(
    kind="encoder_decoder",
    name="BART",
    build=lambda c: Bart(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "learned",
        "position_offset": 2,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "bias": True,
        "tied": True,
        "padding_side": "right",
    },
)
