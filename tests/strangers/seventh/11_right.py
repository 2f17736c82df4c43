"""A translation model in the manner of fairseq: pre-norm, learned positions, padding given as what is to be left out."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, key_padding_mask=None, attn_mask=None):
        """key_padding_mask [B, S] and attn_mask [T, S]: True is left out."""
        bsz, tgt_len, embed_dim = query.size()
        src_len = key.size(1)
        q = self.q_proj(query) * self.scaling
        k = self.k_proj(key)
        v = self.v_proj(key)
        q = q.view(bsz, tgt_len, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        k = k.view(bsz, src_len, self.num_heads, self.head_dim).permute(0, 2, 3, 1)
        v = v.view(bsz, src_len, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        attn_weights = torch.matmul(q, k)
        lowest = torch.finfo(attn_weights.dtype).min
        if attn_mask is not None:
            attn_weights = attn_weights.masked_fill(attn_mask, lowest)
        if key_padding_mask is not None:
            attn_weights = attn_weights.masked_fill(key_padding_mask[:, None, None, :], lowest)
        attn = torch.matmul(F.softmax(attn_weights, dim=-1), v)
        return self.out_proj(attn.permute(0, 2, 1, 3).reshape(bsz, tgt_len, embed_dim))


class EncoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim, num_heads):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_padding_mask):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = residual + self.self_attn(x, x, key_padding_mask=encoder_padding_mask)
        residual = x
        x = self.final_layer_norm(x)
        return residual + self.fc2(F.gelu(self.fc1(x)))


class DecoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim, num_heads):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.encoder_attn = MultiheadAttention(embed_dim, num_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_out, encoder_padding_mask, self_attn_mask, self_attn_padding_mask):
        residual = x
        x = self.self_attn_layer_norm(x)
        x = residual + self.self_attn(x, x, key_padding_mask=self_attn_padding_mask, attn_mask=self_attn_mask)
        residual = x
        x = self.encoder_attn_layer_norm(x)
        x = residual + self.encoder_attn(x, encoder_out, key_padding_mask=encoder_padding_mask)
        residual = x
        x = self.final_layer_norm(x)
        return residual + self.fc2(F.gelu(self.fc1(x)))


class TransformerModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, ffn_dim, num_heads, num_layers, max_positions):
        super().__init__()
        self.encoder_embed_tokens = nn.Embedding(vocab_size, embed_dim)
        self.encoder_embed_positions = nn.Embedding(max_positions, embed_dim)
        self.encoder_layers = nn.ModuleList([EncoderLayer(embed_dim, ffn_dim, num_heads) for _ in range(num_layers)])
        self.encoder_layer_norm = nn.LayerNorm(embed_dim)
        self.decoder_embed_tokens = nn.Embedding(vocab_size, embed_dim)
        self.decoder_embed_positions = nn.Embedding(max_positions, embed_dim)
        self.decoder_layers = nn.ModuleList([DecoderLayer(embed_dim, ffn_dim, num_heads) for _ in range(num_layers)])
        self.decoder_layer_norm = nn.LayerNorm(embed_dim)
        self.output_projection = nn.Linear(embed_dim, vocab_size, bias=False)

    def forward(self, src_tokens, prev_output_tokens, src_padding=None, tgt_padding=None):
        x = self.encoder_embed_tokens(src_tokens)
        x = x + self.encoder_embed_positions.weight[self.places(src_tokens)]
        for layer in self.encoder_layers:
            x = layer(x, src_padding)
        encoder_out = self.encoder_layer_norm(x)

        length = prev_output_tokens.size(1)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = self.decoder_embed_tokens(prev_output_tokens)
        y = y + self.decoder_embed_positions.weight[self.places(prev_output_tokens)]
        for layer in self.decoder_layers:
            y = layer(y, encoder_out, src_padding, future, tgt_padding)
        return self.output_projection(self.decoder_layer_norm(y))

    @staticmethod
    def places(tokens):
        return torch.arange(tokens.size(1), device=tokens.device)


def translate(model, source, target, source_mask=None, target_mask=None):
    return model(
        source,
        target,
        None if source_mask is None else ~source_mask,
        None if target_mask is None else ~target_mask,
    )


subject = Subject(
    kind="encoder_decoder",
    name="fairseq transformer",
    build=lambda c: TransformerModel(c.vocab_size, c.d_model, c.d_ff, c.num_heads, c.num_layers, c.max_len),
    forward=translate,
    declares={
        "causal": True,
        "encodes_source": True,
        "cross_attention": True,
        "positions": "learned",
        "beyond_max_len": "error",
        "embedding_scale": False,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
        "memory": "quadratic",
        "padding_side": "right",
        "structure": "textbook",
    },
)
