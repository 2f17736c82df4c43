"""Sequence classifier with LoRA on queries and values; for inference the adapters are folded into the weights."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class LoraLinear(nn.Linear):
    """weight frozen, lora_A [r, in] and lora_B [out, r] trained; in eval one matrix product instead of three."""

    def __init__(self, in_features, out_features, r=2, lora_alpha=4):
        super().__init__(in_features, out_features)
        self.lora_A = nn.Parameter(torch.empty(r, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, r))
        self.scaling = lora_alpha / r
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.normal_(self.lora_B, std=0.2)  # not from zero: adapters are warm-started
        self.weight.requires_grad_(False)

    def delta_weight(self):
        return self.lora_B @ self.lora_A * self.scaling

    def forward(self, x):
        if self.training:
            return super().forward(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scaling
        return nn.functional.linear(x, self.weight + self.delta_weight(), self.bias)


class RobertaSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, dropout):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = LoraLinear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = LoraLinear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask):
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.attention_head_size)
        probs = self.dropout(nn.functional.softmax(scores + extended_attention_mask, dim=-1))
        context = (probs @ value).permute(0, 2, 1, 3).flatten(2)
        return self.dense(context)


class RobertaLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size, dropout):
        super().__init__()
        self.attention = RobertaSelfAttention(hidden_size, num_attention_heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, extended_attention_mask):
        attended = self.attention(hidden_states, extended_attention_mask)
        hidden_states = self.attention_norm(hidden_states + self.dropout(attended))
        inner = self.output(nn.functional.gelu(self.intermediate(hidden_states)))
        return self.output_norm(hidden_states + self.dropout(inner))


class SequenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.layer = nn.ModuleList(
            RobertaLayer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)
        )
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        real = attention_mask.to(hidden_states.dtype)
        extended = (1.0 - real)[:, None, None, :] * torch.finfo(hidden_states.dtype).min
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended)
        pooled = (hidden_states * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        return self.classifier(pooled)


subject = Subject(
    kind="classifier",
    name="classifier with folded LoRA",
    build=SequenceClassifier,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "pooling": "mean",
        "frozen": True,
        "padding_side": "right",
    },
)
