WHAT = "Queries and keys are normalised, with gains by channel, after the rotation instead of before (line 46): once the gains of a pair differ, scores depend on absolute positions and rotary is not relative any more."
import torch
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.inv_freq = [base ** (-2 * i / dim) for i in range(dim // 2)]

    def forward(self, x):
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float64, device=x.device)
        freqs = torch.einsum("t,f->tf", torch.arange(x.shape[-2], dtype=torch.float64, device=x.device), inv_freq)
        cos, sin = freqs.cos().repeat(1, 2).to(x.dtype), freqs.sin().repeat(1, 2).to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        self.rope = RotaryEmbedding(self.head_dim)

    def forward(self, x, allowed):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q = self.q_norm(self.rope(q))
        k = self.k_norm(self.rope(k))
        k, v = (z.repeat_interleave(self.heads // self.kv_heads, dim=1) for z in (k, v))
        scores = (q @ k.mT) / self.head_dim**0.5
        scores = torch.where(allowed, scores, torch.finfo(scores.dtype).min)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn = Attention(dim, heads, kv_heads)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, allowed):
        x = x + self.attn(self.input_norm(x), allowed)
        h = self.post_norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Qwen(nn.Module):
    def __init__(self, vocab, dim, heads, kv_heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)

    def forward(self, tokens, attention_mask=None):
        t = tokens.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.norm(x) @ self.embed.weight.T


subject = Subject(
    kind="decoder",
    name="qwen",
    build=lambda c: Qwen(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "query_key_norm": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": True,
        "padding_side": "both",
    },
    domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
)
