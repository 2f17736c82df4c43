"""Sliding windows with attention sinks: each query sees the last five tokens and the first two real ones."""
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from veriformer.properties import DrawnConfig, Subject

WINDOW, SINKS = 5, 2


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Attention(nn.Module):
    def __init__(self, d, h, g):
        super().__init__()
        self.h, self.g, self.k = h, g, d // h
        if self.k % 2:
            raise ValueError("odd width of head")
        self.q_proj = nn.Linear(d, h * self.k, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, g * self.k, bias=False), nn.Linear(d, g * self.k, bias=False)
        self.o_proj = nn.Linear(h * self.k, d, bias=False)

    def forward(self, x, see, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.h, self.k).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.g, self.k).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.g, self.k).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (z.repeat_interleave(self.h // self.g, dim=1) for z in (k, v))
        y = scaled_dot_product_attention(q, k, v, attn_mask=see)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c.d_model, c.d_ff
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.self_attn = Attention(d, c.num_heads, c.num_key_value_heads)
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x, *rest):
        x = x + self.self_attn(self.input_layernorm(x), *rest)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.k = c.d_model // c.num_heads
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm, self.lm_head = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        b, t = tokens.shape
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        x = self.embed_tokens(tokens)
        i = torch.arange(t, device=x.device)
        near = i[:, None] - i[None, :] < WINDOW
        first = (real.cumsum(1) <= SINKS)[:, None, :]
        see = (i[:, None] >= i[None, :]) & (near | first) & real[:, None, :]
        see = see | torch.eye(t, dtype=torch.bool, device=x.device)  # rows of padding are never empty
        rate = 10000.0 ** (-torch.arange(0, self.k, 2, device=x.device, dtype=torch.float64) / self.k)
        angle = torch.outer(i.double(), rate).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, see[:, None], cos, sin)
        return self.lm_head(self.norm(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="windows with sinks", build=Model, forward=forward,
    declares={
        "causal": True, "positions": "rotary", "layout": "halves", "base": 10000, "window": WINDOW,
        "sink_tokens": SINKS, "norm": "rms", "norm_placement": "pre", "final_norm": True, "residual": True,
        "activation": "swiglu", "bias": False, "output_bias": False, "tied": False, "grouped_queries": True,
        "padding_side": "both", "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works",
        "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=Model, forward=forward)
