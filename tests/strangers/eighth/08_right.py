"""A RoBERTa-like encoder: post-LN, learned positions that begin behind the padding index."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

PADDING_IDX = 1


def create_position_ids_from_mask(attention_mask, padding_idx):
    """Real tokens are numbered from padding_idx + 1 on; padding has padding_idx itself."""
    mask = attention_mask.long()
    incremental_indices = torch.cumsum(mask, dim=1) * mask
    return incremental_indices + padding_idx


class RobertaEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_length, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(
            max_length + PADDING_IDX + 1, hidden_size, padding_idx=PADDING_IDX
        )
        self.token_type_embeddings = nn.Embedding(1, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask):
        position_ids = create_position_ids_from_mask(attention_mask, PADDING_IDX)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(torch.zeros_like(input_ids))
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class RobertaSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_attention_heads = num_heads
        self.attention_head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask):
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        scores = scores.masked_fill(~extended_attention_mask, torch.finfo(scores.dtype).min)
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous()
        return context.view(*hidden_states.shape)


class RobertaLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.attention = RobertaSelfAttention(hidden_size, num_heads, dropout)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, mask):
        attended = self.dropout(self.attention_output(self.attention(hidden_states, mask)))
        hidden_states = self.attention_norm(attended + hidden_states)
        inner = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(self.dropout(self.output(inner)) + hidden_states)


class RobertaModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, num_heads, intermediate_size, max_length, dropout):
        super().__init__()
        self.embeddings = RobertaEmbeddings(vocab_size, hidden_size, max_length, dropout)
        self.layer = nn.ModuleList(
            [RobertaLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)]
        )
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        attention_mask = attention_mask.bool()
        hidden_states = self.embeddings(input_ids, attention_mask)
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask[:, None, None, :])
        return hidden_states


subject = Subject(
    kind="encoder",
    name="roberta",
    build=lambda c: RobertaModel(
        c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "position_offset": 2,
        "beyond_max_len": "error",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "post",
        "norm_bias": True,
        "final_norm": False,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "other",
        "embedding_scale": False,
        "shared_layers": False,
        "structure": "other",
        "memory": "quadratic",
    },
)
