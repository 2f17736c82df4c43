WHAT = "The per-head RMSNorm of queries and keys stands after the rotation instead of before it (line 52), so that with a gain that is not uniform over a rotary pair scores no longer depend on relative positions alone."
import torch
from torch import nn

from veriformer.properties import Subject


class Qwen3RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Qwen3Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads, rope_theta=10000.0):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        if self.head_dim % 2:
            raise ValueError("head_dim must be even")
        self.num_heads = num_heads
        self.num_kv = num_key_value_heads
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim)
        self.k_norm = Qwen3RMSNorm(self.head_dim)

    def rope(self, x):
        t = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)
        freq = self.rope_theta ** (-torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float64) / self.head_dim)
        angles = torch.outer(t, freq)
        angles = torch.cat((angles, angles), dim=-1)
        return x * angles.cos().to(x.dtype) + rotate_half(x) * angles.sin().to(x.dtype)

    def forward(self, hidden_states, attention_mask=None):
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv, self.head_dim).transpose(1, 2)
        q, k = self.q_norm(self.rope(q)), self.k_norm(self.rope(k))
        n_rep = self.num_heads // self.num_kv
        k = k.repeat_interleave(n_rep, dim=1)
        v = v.repeat_interleave(n_rep, dim=1)
        allowed = torch.ones(q_len, q_len, dtype=torch.bool, device=q.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).masked_fill(~allowed, 0.0)
        out = (weights @ v).transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(out)


subject = Subject(
    kind="self_attention",
    name="Qwen3 attention",
    build=lambda c: Qwen3Attention(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "query_key_norm": True,
        "grouped_queries": True,
        "bias": False,
        "empty_row": "zeros",
    },
)
