WHAT = "Padding is set to 0 before the maximum over time (line 57) instead of to minus infinity, so a channel that is negative at all real tokens is pooled to 0 as soon as the sample has padding."
"""Sentence classifier: a small BERT, the maximum over the real tokens, a linear head."""
import torch
import torch.nn as nn

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.num_heads, self.head_size = heads, hidden // heads
        self.query, self.key, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_mask):
        q, k, v = (self.transpose_for_scores(f(hidden_states)) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.head_size**-0.5 + extended_mask
        context = torch.matmul(scores.softmax(dim=-1), v)
        return self.dense(context.permute(0, 2, 1, 3).flatten(2))


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate):
        super().__init__()
        self.attention = SelfAttention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden)
        self.intermediate, self.output = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden)

    def forward(self, hidden_states, extended_mask):
        hidden_states = self.attention_norm(hidden_states + self.attention(hidden_states, extended_mask))
        inner = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(hidden_states + self.output(inner))


class MaxPooledClassifier(nn.Module):
    def __init__(self, vocab, hidden, heads, layers, intermediate, max_len, labels):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(max_len, hidden)
        self.layer = nn.ModuleList([BertLayer(hidden, heads, intermediate) for _ in range(layers)])
        self.classifier = nn.Linear(hidden, labels)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        lowest = torch.finfo(hidden_states.dtype).min
        extended_mask = (~attention_mask[:, None, None, :]).to(hidden_states.dtype) * lowest
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended_mask)
        pooled = hidden_states.masked_fill(~attention_mask.unsqueeze(-1), 0.0).amax(dim=1)
        return self.classifier(pooled)


subject = Subject(
    kind="classifier",
    name="max-pooled BERT",
    build=lambda c: MaxPooledClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
    },
)
