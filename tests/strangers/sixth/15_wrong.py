import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, attention_probs_dropout_prob):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.all_head_size = hidden_size

        self.query = nn.Linear(hidden_size, self.all_head_size)
        self.key = nn.Linear(hidden_size, self.all_head_size)
        self.value = nn.Linear(hidden_size, self.all_head_size)
        self.output = nn.Linear(self.all_head_size, hidden_size)
        self.dropout = nn.Dropout(attention_probs_dropout_prob)

    def transpose_for_scores(self, x):
        new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        return x.view(new_x_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask=None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))

        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if extended_attention_mask is not None:
            attention_scores = attention_scores.masked_fill(
                ~extended_attention_mask, torch.finfo(attention_scores.dtype).min
            )
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        context_layer = torch.matmul(self.dropout(attention_probs), value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(context_layer.size()[:-2] + (self.all_head_size,))
        return self.output(context_layer), attention_probs


def get_extended_attention_mask(attention_mask):
    """From [batch, seq] to what broadcasts over the scores [batch, heads, from_seq, to_seq]."""
    if attention_mask is None:
        return None
    return attention_mask[:, None, :, None]


subject = Subject(
    kind="self_attention",
    name="BertSelfAttention",
    build=lambda c: BertSelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, get_extended_attention_mask(attention_mask))[0],
    weights=lambda m, x, attention_mask=None: m(x, get_extended_attention_mask(attention_mask))[1],
    projections=lambda m: {
        "q": m.query.weight.data,
        "k": m.key.weight.data,
        "v": m.value.weight.data,
        "o": m.output.weight.data,
        "q_bias": m.query.bias.data,
        "k_bias": m.key.bias.data,
        "v_bias": m.value.bias.data,
        "o_bias": m.output.bias.data,
    },
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "none",
        "attention_scale": "1/sqrt(d_head)",
        "bias": True,
        "init": "default",
        "padding_side": "both",
        "empty_row": "mean",
        "memory": "quadratic",
        "residual": False,
    },
)
