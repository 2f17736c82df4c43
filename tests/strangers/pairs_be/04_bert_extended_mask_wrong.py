WHAT = "the additive mask that the layers share is kept over forwards and asked for by shape alone (it is not reset at the start of a forward): a second batch of the same shape gets the mask of the first: line 68."
"""BERT; the additive mask is made once a forward and shared by the layers."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_probs = nn.functional.softmax(attention_scores + extended_attention_mask, dim=-1)
        context_layer = torch.matmul(attention_probs, value_layer)
        return self.dense(context_layer.permute(0, 2, 1, 3).flatten(2))


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size, hidden_dropout_prob):
        super().__init__()
        self.attention = BertSelfAttention(hidden_size, num_attention_heads)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(hidden_dropout_prob)

    def forward(self, hidden_states, extended_attention_mask):
        attention_output = self.dropout(self.attention(hidden_states, extended_attention_mask))
        hidden_states = self.attention_norm(attention_output + hidden_states)
        layer_output = self.output(nn.functional.gelu(self.intermediate(hidden_states)))
        return self.output_norm(self.dropout(layer_output) + hidden_states)


class BertModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, heads, layers, intermediate_size, max_position_embeddings, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.embeddings_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.layer = nn.ModuleList(
            [BertLayer(hidden_size, heads, intermediate_size, dropout) for _ in range(layers)]
        )
        self._extended_attention_mask = None

    def get_extended_attention_mask(self, attention_mask, dtype):
        cached = self._extended_attention_mask
        if cached is not None and cached.shape[0] == len(attention_mask) and cached.shape[-1] == attention_mask.shape[1]:
            if cached.dtype == dtype and cached.device == attention_mask.device:
                return cached
        extended = (1.0 - attention_mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min
        self._extended_attention_mask = extended
        return extended

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        hidden_states = self.embeddings_norm(hidden_states)
        for layer in self.layer:
            mask = self.get_extended_attention_mask(attention_mask, hidden_states.dtype)
            hidden_states = layer(hidden_states, mask)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="bert",
    build=lambda c: BertModel(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "padding_side": "right",
    },
)
