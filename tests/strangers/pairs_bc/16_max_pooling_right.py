"""A sentence classifier: encoder, maximum over the real tokens, linear head (Hugging Face style)."""
import torch
from torch import nn

from veriformer.properties import Subject


class SentenceLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def transpose_for_scores(self, x):
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = q @ k.transpose(-1, -2) / self.attention_head_size**0.5 + extended_attention_mask
        context = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).flatten(2)
        hidden_states = self.attention_norm(hidden_states + self.dense(context))
        return self.output_norm(hidden_states + self.output(nn.functional.gelu(self.intermediate(hidden_states))))


class SentenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([SentenceLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def pool(self, hidden_states, attention_mask):
        padding = ~attention_mask.unsqueeze(-1)
        hidden_states = hidden_states.masked_fill(padding, torch.finfo(hidden_states.dtype).min)
        return hidden_states.max(dim=1).values

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.word_embeddings(input_ids)
        x = x + self.position_embeddings(torch.arange(input_ids.shape[1], device=input_ids.device))
        extended = (~attention_mask)[:, None, None, :].to(x.dtype) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, extended)
        return self.classifier(self.pool(x, attention_mask))


subject = Subject(
    kind="classifier",
    name="max-pooling classifier",
    build=SentenceClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
        "output_bias": True,
    },
)
