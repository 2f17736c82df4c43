"""RoBERTa's encoder: positions are counted over real tokens, and begin behind the padding index."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject

PADDING_IDX = 1


class RobertaConfig:
    def __init__(self, vocab_size, hidden_size, num_attention_heads, num_hidden_layers, intermediate_size, max_tokens, dropout):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_tokens + PADDING_IDX + 1
        self.hidden_dropout_prob = dropout
        self.pad_token_id = PADDING_IDX
        self.layer_norm_eps = 1e-5


def create_position_ids(attention_mask, padding_idx):
    """Real tokens get padding_idx + 1, padding_idx + 2, ...; padding gets padding_idx."""
    mask = attention_mask.int()
    incremental_indices = torch.cumsum(mask, dim=1).type_as(mask) * mask
    return incremental_indices.long() + padding_idx


class RobertaEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.padding_idx = config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=self.padding_idx)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, config.hidden_size, padding_idx=self.padding_idx
        )
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, attention_mask):
        position_ids = create_position_ids(attention_mask, self.padding_idx)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class RobertaSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def transpose_for_scores(self, x):
        x = x.view(x.size()[:-1] + (self.num_attention_heads, self.attention_head_size))
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_scores = attention_scores.masked_fill(
            ~extended_attention_mask, torch.finfo(attention_scores.dtype).min
        )
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return self.dense(context_layer.view(hidden_states.size()))


class RobertaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = RobertaSelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, extended_attention_mask):
        attention_output = self.dropout(self.attention(hidden_states, extended_attention_mask))
        hidden_states = self.attention_norm(attention_output + hidden_states)
        layer_output = self.dropout(self.output(nn.functional.gelu(self.intermediate(hidden_states))))
        return self.output_norm(layer_output + hidden_states)


class RobertaModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = RobertaEmbeddings(config)
        self.layer = nn.ModuleList([RobertaLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        hidden_states = self.embeddings(input_ids, attention_mask)
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask[:, None, None, :])
        return hidden_states


def build(c):
    return RobertaModel(
        RobertaConfig(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)
    )


subject = Subject(
    kind="encoder",
    name="roberta",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "position_offset": PADDING_IDX + 1,
        "padding_idx": PADDING_IDX,
        "beyond_max_len": "error",
        "embedding_scale": False,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "other",  # a norm behind the embeddings, a row of positions for padding
    },
)
