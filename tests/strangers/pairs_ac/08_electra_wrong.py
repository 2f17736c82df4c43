WHAT = "Attention dropout stands before the softmax: in training a dropped score becomes 0, also where the mask had put -10000, so that padding is attended to (and no weight is ever dropped) (line 34)."
"""ELECTRA's discriminator: says of every token whether the generator has replaced it."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class ElectraSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_heads
        self.attention_head_size = config.d_model // config.num_heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def transpose_for_scores(self, x):
        new_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        return x.view(*new_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        attention_probs = nn.functional.softmax(self.dropout(attention_scores), dim=-1)
        context_layer = torch.matmul(attention_probs, value_layer)
        return context_layer.permute(0, 2, 1, 3).contiguous().flatten(-2)


class ElectraLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = ElectraSelfAttention(config)
        self.attention_dense = nn.Linear(config.d_model, config.d_model)
        self.attention_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.intermediate = nn.Linear(config.d_model, config.d_ff)
        self.output = nn.Linear(config.d_ff, config.d_model)
        self.output_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.hidden_dropout = nn.Dropout(config.dropout)

    def forward(self, x, attention_mask=None):
        attention = self.hidden_dropout(self.attention_dense(self.self(x, attention_mask)))
        x = self.attention_norm(attention + x)
        output = self.hidden_dropout(self.output(nn.functional.gelu(self.intermediate(x))))
        return self.output_norm(output + x)


class ElectraForPreTraining(nn.Module):
    def __init__(self, config, embedding_size=6):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, embedding_size)
        self.position_embeddings = nn.Embedding(config.max_len, embedding_size)
        self.LayerNorm = nn.LayerNorm(embedding_size, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.embeddings_project = nn.Linear(embedding_size, config.d_model)
        self.layer = nn.ModuleList([ElectraLayer(config) for _ in range(config.num_layers)])
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.dense_prediction = nn.Linear(config.d_model, 1)

    def forward(self, input_ids, attention_mask=None):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        hidden_states = self.embeddings_project(self.dropout(self.LayerNorm(embeddings)))
        extended_attention_mask = None
        if attention_mask is not None:
            extended_attention_mask = (1.0 - attention_mask[:, None, None, :].to(hidden_states.dtype)) * -10000.0
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, extended_attention_mask)
        return self.dense_prediction(nn.functional.gelu(self.dense(hidden_states)))


subject = Subject(
    kind="encoder",
    name="ELECTRA discriminator",
    build=lambda c: ElectraForPreTraining(c),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "tied": False,
        "structure": "other",
        "padding_side": "right",
    },
)
