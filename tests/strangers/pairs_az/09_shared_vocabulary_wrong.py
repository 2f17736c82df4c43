WHAT = "tied by .data: storage is shared but there are two parameters, each with a gradient and optimiser state of its own, and a change of dtype parts them (line 74)."
"""An encoder-decoder in the style of fairseq: one vocabulary for source, target and output."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def make_positions(length, embed_dim, reference):
    half = (embed_dim + 1) // 2
    freq = torch.exp(torch.arange(half, device=reference.device).double() * (-2 * math.log(10000.0) / embed_dim))
    angle = torch.arange(length, device=reference.device).double()[:, None] * freq[None, :]
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :embed_dim]
    return table.to(reference.dtype)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_padding_mask):
        residual = x
        x, _ = self.self_attn(x, x, x, key_padding_mask=encoder_padding_mask, need_weights=False)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = self.fc2(F.relu(self.fc1(x)))
        return self.final_layer_norm(residual + x)


class TransformerDecoderLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.encoder_attn = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_out, encoder_padding_mask, self_attn_mask, self_attn_padding_mask):
        residual = x
        x, _ = self.self_attn(
            x, x, x, attn_mask=self_attn_mask, key_padding_mask=self_attn_padding_mask, need_weights=False
        )
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x, _ = self.encoder_attn(
            x, encoder_out, encoder_out, key_padding_mask=encoder_padding_mask, need_weights=False
        )
        x = self.encoder_attn_layer_norm(residual + x)
        residual = x
        x = self.fc2(F.relu(self.fc1(x)))
        return self.final_layer_norm(residual + x)


class TransformerModel(nn.Module):
    def __init__(self, num_embeddings, embed_dim, heads, ffn_dim, layers):
        super().__init__()
        self.embed_scale = math.sqrt(embed_dim)
        self.embed_tokens = nn.Embedding(num_embeddings, embed_dim)
        nn.init.normal_(self.embed_tokens.weight, mean=0, std=embed_dim**-0.5)
        self.encoder_layers = nn.ModuleList(TransformerEncoderLayer(embed_dim, heads, ffn_dim) for _ in range(layers))
        self.decoder_layers = nn.ModuleList(TransformerDecoderLayer(embed_dim, heads, ffn_dim) for _ in range(layers))
        self.output_projection = nn.Linear(embed_dim, num_embeddings, bias=False)
        # --share-all-embeddings
        self.output_projection.weight.data = self.embed_tokens.weight.data

    def embed(self, tokens):
        x = self.embed_scale * self.embed_tokens(tokens)
        return x + make_positions(tokens.size(1), x.size(-1), x)

    def forward(self, src_tokens, prev_output_tokens, src_mask=None, tgt_mask=None):
        encoder_padding_mask = None if src_mask is None else ~src_mask
        decoder_padding_mask = None if tgt_mask is None else ~tgt_mask
        x = self.embed(src_tokens)
        for layer in self.encoder_layers:
            x = layer(x, encoder_padding_mask)
        encoder_out = x
        x = self.embed(prev_output_tokens)
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        for layer in self.decoder_layers:
            x = layer(x, encoder_out, encoder_padding_mask, future, decoder_padding_mask)
        return self.output_projection(x)


subject = Subject(
    kind="encoder_decoder",
    name="shared vocabulary",
    build=lambda c: TransformerModel(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "tied": True,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)
