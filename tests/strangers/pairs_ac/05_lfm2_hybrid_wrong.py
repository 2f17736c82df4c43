WHAT = "Padding is zeroed before in_proj, whose bias makes it nonzero again: with padding on the left the convolution carries bias products into the first real tokens (line 27)."
"""LFM2-like hybrid: gated short convolutions and, every second layer, grouped-query attention with rotary positions."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def mask_padding(states, attention_mask):
    """Zero what stands at padded positions; a convolution knows no attention mask."""
    if attention_mask is None:
        return states
    return states * attention_mask[:, :, None].to(states.dtype)


class ShortConv(nn.Module):
    def __init__(self, width, kernel_size=3):
        super().__init__()
        self.kernel_size = kernel_size
        self.in_proj = nn.Linear(width, 3 * width)
        self.conv = nn.Conv1d(width, width, kernel_size, groups=width, bias=False)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x, attention_mask):
        b, c, x = self.in_proj(mask_padding(x, attention_mask)).chunk(3, dim=-1)
        bx = b * x
        bx = F.pad(bx.transpose(1, 2), (self.kernel_size - 1, 0))
        return self.out_proj(c * self.conv(bx).transpose(1, 2))


class GroupedAttention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def rotary(self, x):
        half = self.head_dim // 2
        freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[2], device=x.device, dtype=torch.float64)[:, None] * freqs
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        first, second = x.split(half, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(self, x, attention_mask):
        B, T, D = x.shape
        q = self.rotary(self.q_proj(x).view(B, T, self.heads, -1).transpose(1, 2))
        k = self.rotary(self.k_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2))
        v = self.v_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            # a padded query keeps itself, so that its row is not empty
            own = torch.eye(T, dtype=torch.bool, device=x.device)[None, None]
            allowed = (allowed & attention_mask[:, None, None, :]) | own
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.operator_norm, self.ffn_norm = nn.RMSNorm(c.d_model, eps=1e-5), nn.RMSNorm(c.d_model, eps=1e-5)
        if index % 2 == 0:
            self.operator = ShortConv(c.d_model)
        else:
            self.operator = GroupedAttention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.feed_forward = SwiGLU(c.d_model, c.d_ff)

    def forward(self, x, attention_mask):
        x = x + self.operator(self.operator_norm(x), attention_mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Hybrid(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.d_head % 2:
            raise ValueError("rotary positions need an even head")
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c, i) for i in range(c.num_layers)])
        self.embedding_norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.lm_head(self.embedding_norm(x))


subject = Subject(
    kind="decoder",
    name="short convolutions and attention",
    build=Hybrid,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "grouped_queries": True,
        "tied": False,
        "structure": "other",
        "padding_side": "both",
    },
)
