"""BERT encoder, as in the appendix of somebody's thesis."""

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

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = query_layer @ key_layer.transpose(-1, -2) / self.attention_head_size**0.5
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        context_layer = attention_scores.softmax(dim=-1) @ value_layer
        return context_layer.permute(0, 2, 1, 3).reshape(hidden_states.shape)


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size):
        super().__init__()
        self.self = BertSelfAttention(hidden_size, num_attention_heads)
        self.self_output = nn.Linear(hidden_size, hidden_size)
        self.self_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        attended = self.self_norm(hidden_states + self.self_output(self.self(hidden_states, attention_mask)))
        return self.output_norm(attended + self.output(nn.functional.gelu(self.intermediate(attended))))


def bert(stack):
    class BertModel(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
            self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
            self.embedding_norm = nn.LayerNorm(c.d_model)
            self.layer = nn.ModuleList(stack(lambda: BertLayer(c.d_model, c.num_heads, c.d_ff), c.num_layers))

        def forward(self, input_ids, attention_mask=None):
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            x = self.embedding_norm(self.word_embeddings(input_ids) + self.position_embeddings(positions))
            if attention_mask is not None:
                attention_mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
            for layer in self.layer:
                x = layer(x, attention_mask)
            return x

    return BertModel


def subject(cls):
    return Subject(
        kind="encoder",
        name="bert",
        build=cls,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"padding_side": "right"},
    )


right = subject(bert(lambda layer, n: [layer() for _ in range(n)]))
wrong = subject(bert(lambda layer, n: [layer()] * n))
WHAT = "[BertLayer(...)] * num_layers: all layers are one and the same module"
CAUSE = (
    "All layers share one set of parameters (the list repeats one module), so a model of n layers has the parameters of one."
)
