WHAT = 'The mask is put on the scores before the soft cap (lines from 32): c * tanh(-huge / c) = -c, so that future and padded keys keep a weight of about exp(-c) instead of none.'
# Attention of Gemma 2 as I read the report: grouped queries, soft-capped scores, no biases.
import torch
from torch import nn

from veriformer.properties import Subject


class SoftCappedAttention(nn.Module):
    def __init__(self, dim, num_heads, num_kv_heads, soft_cap=5.0):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = dim // num_heads
        self.soft_cap = soft_cap
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, bias=False)

    def forward(self, x, attention_mask=None):
        B, T, _ = x.shape
        G, R = self.num_kv_heads, self.num_heads // self.num_kv_heads
        q = self.q_proj(x).view(B, T, G, R, self.head_dim)
        k = self.k_proj(x).view(B, T, G, self.head_dim)
        v = self.v_proj(x).view(B, T, G, self.head_dim)

        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().expand(B, T, T)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, :]

        scores = torch.einsum("btgrd,bsgd->bgrts", q, k) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed[:, None, None], torch.finfo(scores.dtype).min)
        scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        weights = scores.softmax(dim=-1)
        out = torch.einsum("bgrts,bsgd->btgrd", weights, v)
        return self.o_proj(out.reshape(B, T, -1))


subject = Subject(
    kind="self_attention",
    name="soft-capped attention",
    build=lambda c: SoftCappedAttention(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "positions": "none",
        "soft_cap": 5.0,
        "grouped_queries": True,
        "bias": False,
        "padding_side": "right",
    },
)
