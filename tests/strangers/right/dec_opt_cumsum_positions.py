"""OPT style decoder: queries scaled before the product, learned positions counted from the mask with an offset of 2.

Because a position is the number of real tokens so far, padding may stand on either side in spite of absolute positions.
The mask is additive and the sum is clamped at the smallest number, so nothing overflows; a query without any key gives 0.
"""

import torch
from torch import nn

from veriformer.properties import Subject


class OPTLearnedPositionalEmbedding(nn.Embedding):
    def __init__(self, num_embeddings, embedding_dim):
        self.offset = 2
        super().__init__(num_embeddings + self.offset, embedding_dim)

    def forward(self, attention_mask):
        attention_mask = attention_mask.long()
        positions = (torch.cumsum(attention_mask, dim=1) * attention_mask) - 1
        return super().forward(positions + self.offset)


class OPTAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor, seq_len, bsz):
        return tensor.view(bsz, seq_len, self.num_heads, self.head_dim).transpose(1, 2).contiguous()

    def forward(self, hidden_states, attention_mask, has_key):
        bsz, tgt_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states) * self.scaling
        key_states = self._shape(self.k_proj(hidden_states), -1, bsz)
        value_states = self._shape(self.v_proj(hidden_states), -1, bsz)
        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self._shape(query_states, tgt_len, bsz).view(*proj_shape)
        key_states = key_states.view(*proj_shape)
        value_states = value_states.view(*proj_shape)
        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))
        attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, tgt_len) + attention_mask
        attn_weights = attn_weights.clamp(min=torch.finfo(attn_weights.dtype).min)
        attn_weights = torch.softmax(attn_weights, dim=-1) * has_key
        attn_probs = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.bmm(attn_probs.view(bsz * self.num_heads, tgt_len, tgt_len).to(value_states.dtype), value_states)
        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        return self.out_proj(attn_output.reshape(bsz, tgt_len, self.embed_dim))


class OPTDecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dropout = c.dropout
        self.self_attn = OPTAttention(c.d_model, c.num_heads, c.dropout)
        self.self_attn_layer_norm = nn.LayerNorm(c.d_model)
        self.fc1 = nn.Linear(c.d_model, c.d_ff)
        self.fc2 = nn.Linear(c.d_ff, c.d_model)
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.activation_fn = nn.ReLU(inplace=True)

    def forward(self, hidden_states, attention_mask, has_key):
        residual = hidden_states
        hidden_states = self.self_attn(self.self_attn_layer_norm(hidden_states), attention_mask, has_key)
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states

        # Fully Connected, on [tokens, width]
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_states.size(-1))
        residual = hidden_states
        hidden_states = self.activation_fn(self.fc1(self.final_layer_norm(hidden_states)))
        hidden_states = nn.functional.dropout(self.fc2(hidden_states), p=self.dropout, training=self.training)
        return (residual + hidden_states).view(shape)


class OPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = OPTLearnedPositionalEmbedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([OPTDecoderLayer(c) for _ in range(c.num_layers)])
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones(batch, length, dtype=torch.bool, device=input_ids.device)
        x = self.embed_tokens(input_ids) + self.embed_positions(attention_mask)
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device))
        seen = seen[None, None] & attention_mask[:, None, None, :]
        additive = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
        has_key = seen.any(dim=-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, additive, has_key)
        return self.lm_head(self.final_layer_norm(x))


COMMON = dict(
    kind="decoder",
    build=OPT,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "learned",
        "position_offset": 2,
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "tied": True,
    },
)
