"""BERT style encoder: learned positions, token types, LayerNorm behind the sums, additive mask, padding_idx=0.

Unusual: the embedding of id 0 stays zero and is not trained (nn.Embedding(padding_idx=0)); hiding is up to attention_mask
alone, so an id 0 that is not masked is an ordinary token without an embedding of its own. A row that is all padding attends
evenly to everything, as in BERT, and stays finite.
"""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.d_model, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_len, config.d_model)
        self.token_type_embeddings = nn.Embedding(2, config.d_model)
        self.LayerNorm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("position_ids", torch.arange(config.max_len).expand((1, -1)), persistent=False)

    def forward(self, input_ids=None, inputs_embeds=None, token_type_ids=None):
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        seq_length = inputs_embeds.size(1)
        position_ids = self.position_ids[:, :seq_length]
        if token_type_ids is None:
            token_type_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        embeddings = inputs_embeds + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_heads
        self.attention_head_size = config.d_model // config.num_heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def transpose_for_scores(self, x):
        x = x.view(x.size()[:-1] + (self.num_attention_heads, self.attention_head_size))
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask.to(attention_scores.dtype)
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context_layer.flatten(2)


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.attention_output = nn.Linear(config.d_model, config.d_model)
        self.attention_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.intermediate = nn.Linear(config.d_model, config.d_ff)
        self.output = nn.Linear(config.d_ff, config.d_model)
        self.output_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states, attention_mask):
        attended = self.dropout(self.attention_output(self.self(hidden_states, attention_mask)))
        attended = self.attention_norm(attended + hidden_states)
        wide = nn.functional.gelu(self.intermediate(attended))
        return self.output_norm(self.dropout(self.output(wide)) + attended)


class BertModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = nn.ModuleList([BertLayer(config) for _ in range(config.num_layers)])

    def get_extended_attention_mask(self, attention_mask, dtype):
        extended = attention_mask[:, None, None, :].to(dtype)
        # a thousandth of the range: exp of it is zero, and adding a score cannot overflow to infinity
        return (1.0 - extended) * (torch.finfo(dtype).min / 1000)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        hidden_states = self.embeddings(input_ids=input_ids, inputs_embeds=inputs_embeds)
        extended = None
        if attention_mask is not None:
            extended = self.get_extended_attention_mask(attention_mask, hidden_states.dtype)
        for layer in self.encoder:
            hidden_states = layer(hidden_states, extended)
        return hidden_states


COMMON = dict(
    kind="encoder",
    build=BertModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    embed=lambda m, embeddings, attention_mask=None: m(attention_mask=attention_mask, inputs_embeds=embeddings),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "learned",
        "padding_idx": 0,
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "bias": True,
    },
)
