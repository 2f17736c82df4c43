WHAT = 'the class token is put before the tokens, its place in the padding mask behind them (`cat([attention_mask, ones])`), so the mask is shifted by one against the sequence'
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def forward(self, hidden_states, extended_attention_mask=None):
        context = scaled_dot_product_attention(
            self.transpose_for_scores(self.query(hidden_states)),
            self.transpose_for_scores(self.key(hidden_states)),
            self.transpose_for_scores(self.value(hidden_states)),
            attn_mask=extended_attention_mask,
        )
        return self.dense(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden_states, mask=None):
        hidden_states = self.attention_norm(hidden_states + self.attention(hidden_states, mask))
        intermediate = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(hidden_states + self.output(intermediate))


class SequenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.max_len = c.max_len
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len + 1, c.d_model)
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model))
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        hidden_states = torch.cat([self.cls_token.expand(batch, -1, -1), self.word_embeddings(input_ids)], dim=1)
        hidden_states = hidden_states + self.position_embeddings.weight[: length + 1]
        mask = None
        if attention_mask is not None:
            ones = attention_mask.new_ones(batch, 1)
            mask = torch.cat([attention_mask, ones], dim=1)[:, None, None, :]
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        return self.classifier(hidden_states[:, 0])


subject = Subject(
    kind="classifier",
    name="classifier with a class token",
    build=SequenceClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "norm_placement": "post", "norm": "layer", "activation": "gelu",
        "pooling": "cls", "extra_tokens": 1, "padding_side": "right",
    },
)
