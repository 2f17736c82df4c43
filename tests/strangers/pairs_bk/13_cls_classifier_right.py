import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_heads = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, extended_attention_mask=None):
        shape = (*hidden_states.shape[:2], self.num_heads, -1)
        query_layer = self.query(hidden_states).view(shape).transpose(1, 2)
        key_layer = self.key(hidden_states).view(shape).transpose(1, 2)
        value_layer = self.value(hidden_states).view(shape).transpose(1, 2)
        scores = query_layer @ key_layer.transpose(-1, -2) / query_layer.shape[-1] ** 0.5
        if extended_attention_mask is not None:
            scores = scores + extended_attention_mask
        context = scores.softmax(-1) @ value_layer
        return self.dense(context.transpose(1, 2).flatten(2))


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size):
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_attention_heads)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden_states, mask):
        hidden_states = self.attention_norm(hidden_states + self.attention(hidden_states, mask))
        return self.output_norm(hidden_states + self.output(F.gelu(self.intermediate(hidden_states))))


class SequenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len + 1, c.d_model)
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model))
        self.layer = nn.ModuleList([BertLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def forward(self, input_ids, attention_mask=None):
        embeddings = self.word_embeddings(input_ids)
        embeddings = torch.cat([self.cls_token.expand(len(input_ids), -1, -1), embeddings], dim=1)
        positions = torch.arange(embeddings.shape[1], device=input_ids.device)
        hidden_states = embeddings + self.position_embeddings(positions)
        extended = None
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (1, 0), value=True)
            extended = torch.zeros(attention_mask.shape, dtype=embeddings.dtype, device=input_ids.device)
            extended = extended.masked_fill(~attention_mask, torch.finfo(embeddings.dtype).min)[:, None, None, :]
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended)
        return self.classifier(hidden_states[:, 0])


subject = Subject(
    kind="classifier",
    build=SequenceClassifier,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "extra_tokens": 1,
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "output_bias": True,
    },
)
