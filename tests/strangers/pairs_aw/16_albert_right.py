"""ALBERT for sequence classification: factorised embeddings, one layer used again and again, tanh pooler."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class AlbertLayer(nn.Module):
    def __init__(self, hidden, heads, inner, dropout):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.dense, self.LayerNorm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, eps=1e-12)
        self.ffn, self.ffn_output = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.full_layer_layer_norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, hidden_states, mask):
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        context = F.dropout(self.dense(context), self.p, self.training)
        attended = self.LayerNorm(hidden_states + context)
        out = self.ffn_output(F.gelu(self.ffn(attended), approximate="tanh"))
        return self.full_layer_layer_norm(F.dropout(out, self.p, self.training) + attended)


class AlbertForSequenceClassification(nn.Module):
    def __init__(self, vocab, embedding_size, hidden, layers, heads, inner, max_len, num_labels, dropout):
        super().__init__()
        self.num_hidden_layers, self.classifier_dropout = layers, dropout
        self.word_embeddings = nn.Embedding(vocab, embedding_size)
        self.position_embeddings = nn.Embedding(max_len, embedding_size)
        self.embedding_norm = nn.LayerNorm(embedding_size, eps=1e-12)
        self.embedding_hidden_mapping_in = nn.Linear(embedding_size, hidden)
        self.albert_layer = AlbertLayer(hidden, heads, inner, dropout)
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, num_labels)

    def forward(self, input_ids, attention_mask=None):
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding_norm(self.word_embeddings(input_ids) + self.position_embeddings(positions))
        x = self.embedding_hidden_mapping_in(x)
        for _ in range(self.num_hidden_layers):
            x = self.albert_layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        pooled = F.dropout(pooled, self.classifier_dropout, self.training)
        return self.classifier(pooled)


subject = Subject(
    kind="classifier",
    name="ALBERT",
    build=lambda c: AlbertForSequenceClassification(
        c.vocab_size, 6, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.num_classes, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "cls",
        "shared_layers": True,
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu_tanh",
        "padding_side": "right",
        "structure": "other",
    },
)
