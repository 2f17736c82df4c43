WHAT = "torch.no_grad() covers the rotation of queries and keys and not just the making of the tables (line 30), so outputs are right but no gradient reaches the query and key projections."
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, theta=10000.0):
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    @torch.no_grad()
    def tables(self, seq_len, like):
        inv = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=like.device) / self.head_dim)
        freqs = torch.arange(seq_len, dtype=torch.float64, device=like.device)[:, None] * inv
        return freqs.cos().to(like.dtype), freqs.sin().to(like.dtype)

    @torch.no_grad()
    def forward(self, q, k):
        cos, sin = self.tables(q.shape[-2], q)

        def turn(x):
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        return turn(q), turn(k)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("head_dim must be even")
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim), RMSNorm(dim)
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)
        self.rotary_emb = RotaryEmbedding(dim // heads)

    def attention(self, x, attention_mask):
        b, t, d = x.shape
        q, k, v = self.qkv_proj(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.rotary_emb(q, k)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        s = (q @ k.mT) / (d // self.heads) ** 0.5
        p = s.masked_fill(~allowed, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~allowed, 0)
        return self.o_proj((p @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, attention_mask=None):
        x = x + self.attention(self.input_layernorm(x), attention_mask)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


subject = Subject(
    kind="layer",
    name="Llama layer",
    build=lambda c: LlamaDecoderLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "empty_row": "zeros",
    },
)
