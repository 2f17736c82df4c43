WHAT = "the additive mask is kept from call to call and made anew only when its shape or dtype changes (line 24): a second batch of the same shape is masked by the padding of the first."
"""Cross-attention of a Hugging Face style decoder, with an additive mask."""

import torch
from torch import nn

from veriformer.properties import Subject


class DecoderCrossAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, attention_dropout=0.0):
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(attention_dropout)
        self.bias = None

    def get_extended_mask(self, encoder_attention_mask, dtype):
        shape = (encoder_attention_mask.shape[0], 1, 1, encoder_attention_mask.shape[1])
        if self.bias is None or self.bias.shape != shape or self.bias.dtype != dtype:
            bias = torch.zeros(shape, dtype=dtype, device=encoder_attention_mask.device)
            self.bias = bias.masked_fill(~encoder_attention_mask.bool()[:, None, None, :], torch.finfo(dtype).min)
        return self.bias

    def transpose_for_scores(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, hidden_states, encoder_hidden_states, encoder_attention_mask=None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(encoder_hidden_states))
        value_layer = self.transpose_for_scores(self.value(encoder_hidden_states))

        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2)) / self.head_dim**0.5
        if encoder_attention_mask is not None:
            attention_scores = attention_scores + self.get_extended_mask(encoder_attention_mask, hidden_states.dtype)
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))

        context = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3)
        return self.dense(context.reshape(hidden_states.shape))


subject = Subject(
    kind="cross_attention",
    name="decoder cross-attention",
    build=lambda c: DecoderCrossAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"positions": "none", "bias": True},
)
