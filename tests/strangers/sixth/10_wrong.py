from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class ModelArgs:
    dim: int
    n_heads: int
    n_kv_heads: int
    sliding_window: int = 4
    rope_theta: float = 10000.0


class RollingCache:
    """The keys and values that later tokens can still see."""

    def __init__(self, window: int):
        self.window = window
        self.seen = 0
        self.k: Optional[torch.Tensor] = None
        self.v: Optional[torch.Tensor] = None

    def update(self, k, v):
        if self.k is not None:
            k, v = torch.cat([self.k, k], dim=1), torch.cat([self.v, v], dim=1)
        self.k, self.v = k[:, -self.window :], v[:, -self.window :]
        return self.k, self.v


def apply_rotary(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    # x [B, T, H, D], neighbours are a pair
    D = x.shape[-1]
    freqs = theta ** (-torch.arange(0, D, 2, dtype=torch.float64, device=x.device) / D)
    angle = positions.to(torch.float64)[:, None] * freqs
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.head_dim = args.dim // args.n_heads
        self.repeats = args.n_heads // args.n_kv_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, mask=None, cache: Optional[RollingCache] = None):
        B, T, _ = x.shape
        start = 0 if cache is None else cache.seen
        q = self.wq(x).view(B, T, self.args.n_heads, self.head_dim)
        k = self.wk(x).view(B, T, self.args.n_kv_heads, self.head_dim)
        v = self.wv(x).view(B, T, self.args.n_kv_heads, self.head_dim)
        q_pos = torch.arange(start, start + T, device=x.device)
        q, k = apply_rotary(q, q_pos, self.args.rope_theta), apply_rotary(k, q_pos, self.args.rope_theta)
        if cache is not None:
            k, v = cache.update(k, v)
            cache.seen += T
        k_pos = torch.arange(start + T - k.shape[1], start + T, device=x.device)

        k, v = k.repeat_interleave(self.repeats, dim=2), v.repeat_interleave(self.repeats, dim=2)
        behind = q_pos[:, None] - k_pos[None, :]
        allowed = ((behind >= 0) & (behind < self.args.sliding_window))[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, k_pos]
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = scores.softmax(dim=-1).masked_fill(~allowed, 0)
        return self.wo(torch.einsum("bhts,bshd->bthd", probs, v).reshape(B, T, -1))


def decode(model, chunks, attention_mask=None):
    cache = RollingCache(model.args.sliding_window)
    return torch.cat([model(chunk, attention_mask, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="self_attention",
    name="sliding window attention",
    build=lambda c: Attention(ModelArgs(c.d_model, c.num_heads, c.num_key_value_heads)),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    cache=decode,
    projections=lambda m: {"q": m.wq.weight.data, "k": m.wk.weight.data, "v": m.wv.weight.data, "o": m.wo.weight.data},
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    mask_forms=("padding",),
    declares={
        "causal": True,
        "window": 4,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "bias": False,
        "init": "default",
        "padding_side": "both",
        "empty_row": "zeros",
        "cached_chunks": True,
        "memory": "quadratic",
        "residual": False,
    },
)
