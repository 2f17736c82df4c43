import math

import torch
from torch import nn

from veriformer.properties import Subject


def alibi_slopes(num_heads: int) -> torch.Tensor:
    closest_power_of_2 = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest_power_of_2) - 3)))
    powers = torch.arange(1, 1 + closest_power_of_2, dtype=torch.float64)
    slopes = torch.pow(torch.tensor(base, dtype=torch.float64), powers)
    if closest_power_of_2 != num_heads:
        extra_base = 2 ** (-(2 ** -(math.log2(2 * closest_power_of_2) - 3)))
        num_remaining_heads = num_heads - closest_power_of_2
        extra_powers = torch.arange(1, 1 + 2 * num_remaining_heads, 2, dtype=torch.float64)
        slopes = torch.cat([slopes, torch.pow(torch.tensor(extra_base, dtype=torch.float64), extra_powers)], dim=0)
    return slopes


class BloomAttention(nn.Module):
    def __init__(self, hidden_size: int, n_head: int, attention_dropout: float):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = n_head
        self.head_dim = hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)

    def _split_heads(self, fused_qkv):
        # [batch, seq, n_head * 3 * head_dim], head by head
        batch, length, _ = fused_qkv.shape
        fused_qkv = fused_qkv.view(batch, length, self.num_heads, 3, self.head_dim)
        return (fused_qkv[..., i, :].transpose(1, 2) for i in range(3))

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        batch, length, _ = hidden_states.shape
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        place = torch.arange(length, device=hidden_states.device)
        distance = (place[None, :] - place[:, None]).to(torch.float64)
        alibi = alibi_slopes(self.num_heads).to(distance)[:, None, None] * distance
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.inv_norm_factor + alibi.to(query.dtype)
        allowed = (distance <= 0)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        attention_probs = torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)
        context = torch.matmul(self.attention_dropout(attention_probs), value)
        output = self.dense(context.transpose(1, 2).reshape(batch, length, self.hidden_size))
        return (output, attention_probs) if output_attentions else output


subject = Subject(
    kind="self_attention",
    name="BloomAttention",
    build=lambda c: BloomAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    weights=lambda m, x, attention_mask=None: m(x, attention_mask, output_attentions=True)[1],
    domain={"d_model": (12, 24, 48), "num_heads": (1, 2, 3, 4, 6, 12)},
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "alibi",
        "attention_scale": "1/sqrt(d_head)",
        "bias": True,
        "init": "default",
        "padding_side": "both",
        "empty_row": "zeros",
        "memory": "quadratic",
        "residual": False,
    },
)
