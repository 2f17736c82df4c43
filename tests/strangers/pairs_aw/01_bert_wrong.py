WHAT = "BertOutput (the feed-forward half only) adds the residual behind the LayerNorm instead of in front of it, so that half of the layer is not post-norm (line 73)"
"""BERT, written after modeling_bert.py."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_position_embeddings, hidden_dropout_prob):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.token_type_embeddings = nn.Embedding(2, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(hidden_dropout_prob)

    def forward(self, input_ids, token_type_ids=None):
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device).unsqueeze(0)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        context = torch.matmul(nn.functional.softmax(scores, dim=-1), v)
        return context.permute(0, 2, 1, 3).flatten(2)


class BertSelfOutput(nn.Module):
    def __init__(self, hidden_size, hidden_dropout_prob):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class BertOutput(nn.Module):
    def __init__(self, intermediate_size, hidden_size, hidden_dropout_prob):
        super().__init__()
        self.dense = nn.Linear(intermediate_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(states) + input_tensor


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size, dropout):
        super().__init__()
        self.attention = BertSelfAttention(hidden_size, num_attention_heads)
        self.attention_output = BertSelfOutput(hidden_size, dropout)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = BertOutput(intermediate_size, hidden_size, dropout)

    def forward(self, hidden_states, attention_mask=None):
        attended = self.attention_output(self.attention(hidden_states, attention_mask), hidden_states)
        return self.output(nn.functional.gelu(self.intermediate(attended)), attended)


class BertModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, num_heads, intermediate_size, max_positions, dropout=0.0):
        super().__init__()
        self.embeddings = BertEmbeddings(vocab_size, hidden_size, max_positions, dropout)
        self.layer = nn.ModuleList(
            [BertLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)]
        )

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embeddings(input_ids)
        if attention_mask is not None:
            extended = attention_mask[:, None, None, :].to(hidden_states.dtype)
            attention_mask = (1.0 - extended) * torch.finfo(hidden_states.dtype).min
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="BERT",
    build=lambda c: BertModel(
        c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
        "bias": True,
    },
)
