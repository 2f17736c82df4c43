WHAT = 'wrong parameters: the decoder layer norms its feed-forward sublayer with encoder_attn_layer_norm again, and final_layer_norm is never used nor trained (line 94: x = self.encoder_attn_layer_norm(x))'
"""BART after fairseq: time first (T x B x C), norms behind the sublayers, positions from a table with an offset of two."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class LearnedPositionalEmbedding(nn.Embedding):
    """The first two rows are kept for padding, as in the released checkpoints."""

    OFFSET = 2

    def __init__(self, num_embeddings, embedding_dim):
        super().__init__(num_embeddings + self.OFFSET, embedding_dim)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device) + self.OFFSET
        return super().forward(positions)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj, self.v_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.q_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        tgt_len, bsz, embed_dim = query.size()
        src_len = key.size(0)
        q = self.q_proj(query) * self.scaling
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = self.k_proj(key).contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = self.v_proj(value).contiguous().view(src_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if attn_mask is not None:
            attn_weights = attn_weights.masked_fill(attn_mask[None], float("-inf"))
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = attn_weights.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_probs = F.dropout(F.softmax(attn_weights, dim=-1), p=self.dropout, training=self.training)
        attn = torch.bmm(attn_probs, v).transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim, dropout):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout_module = nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_padding_mask):
        residual = x
        x = self.self_attn(x, x, x, key_padding_mask=encoder_padding_mask)
        x = self.self_attn_layer_norm(residual + self.dropout_module(x))
        residual = x
        x = self.fc2(F.gelu(self.fc1(x)))
        return self.final_layer_norm(residual + self.dropout_module(x))


class TransformerDecoderLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim, dropout):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.encoder_attn = MultiheadAttention(embed_dim, heads, dropout)
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout_module = nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, encoder_out, encoder_padding_mask, self_attn_mask, self_attn_padding_mask):
        residual = x
        x = self.self_attn(x, x, x, key_padding_mask=self_attn_padding_mask, attn_mask=self_attn_mask)
        x = residual + self.dropout_module(x)
        x = self.self_attn_layer_norm(x)

        residual = x
        x = self.encoder_attn(x, encoder_out, encoder_out, key_padding_mask=encoder_padding_mask)
        x = residual + self.dropout_module(x)
        x = self.encoder_attn_layer_norm(x)

        residual = x
        x = self.fc2(F.gelu(self.fc1(x)))
        x = residual + self.dropout_module(x)
        x = self.encoder_attn_layer_norm(x)
        return x


class BARTModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder_positions = LearnedPositionalEmbedding(c.max_len, c.d_model)
        self.decoder_positions = LearnedPositionalEmbedding(c.max_len, c.d_model)
        self.encoder_layernorm_embedding = nn.LayerNorm(c.d_model)
        self.decoder_layernorm_embedding = nn.LayerNorm(c.d_model)
        self.dropout_module = nn.Dropout(c.dropout)
        args = (c.d_model, c.num_heads, c.d_ff, c.dropout)
        self.encoder_layers = nn.ModuleList([TransformerEncoderLayer(*args) for _ in range(c.num_layers)])
        self.decoder_layers = nn.ModuleList([TransformerDecoderLayer(*args) for _ in range(c.num_layers)])

    def forward(self, src_tokens, prev_output_tokens, src_padding=None, tgt_padding=None):
        x = self.embed_tokens(src_tokens) + self.encoder_positions(src_tokens)
        x = self.dropout_module(self.encoder_layernorm_embedding(x)).transpose(0, 1)
        for layer in self.encoder_layers:
            x = layer(x, src_padding)
        encoder_out = x

        x = self.embed_tokens(prev_output_tokens) + self.decoder_positions(prev_output_tokens)
        x = self.dropout_module(self.decoder_layernorm_embedding(x)).transpose(0, 1)
        size = x.size(0)
        future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.decoder_layers:
            x = layer(x, encoder_out, src_padding, future, tgt_padding)
        return F.linear(x.transpose(0, 1), self.embed_tokens.weight)


subject = Subject(
    kind="encoder_decoder",
    name="BART",
    build=BARTModel,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(
        source, target, None if source_mask is None else ~source_mask, None if target_mask is None else ~target_mask
    ),
    declares={
        "positions": "learned", "position_offset": 2, "norm": "layer", "norm_placement": "post", "activation": "gelu",
        "bias": True, "output_bias": False, "tied": True, "padding_side": "right",
    },
)
