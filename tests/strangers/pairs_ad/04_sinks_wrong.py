WHAT = "the sink is added to the denominator once for each tile of keys rather than once (inside the loop, line 44), so that it weighs more the longer the sequence, later and hidden keys included"
"""Causal self-attention with a learned sink a head (as in gpt-oss), computed over tiles of keys."""

import torch
from torch import nn

from veriformer.properties import Subject

TILE = 4


class SinkAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.sinks = nn.Parameter(torch.randn(n_heads))

    def heads(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        q = q * self.d_head**-0.5
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()

        sink = self.sinks.view(1, -1, 1, 1).to(q.dtype)
        top = sink.detach().expand(B, self.n_heads, T, 1)  # never below the sink, hence always finite
        denominator = torch.zeros_like(top)
        numerator = torch.zeros_like(q)
        for i in range(0, T, TILE):
            scores = q @ k[:, :, i : i + TILE].transpose(-2, -1)
            scores = scores.masked_fill(~allowed[..., i : i + TILE], float("-inf"))
            new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            weights = (scores - new_top).exp()
            rescale = (top - new_top).exp()
            denominator = denominator * rescale + weights.sum(-1, keepdim=True) + (sink - new_top).exp()
            numerator = numerator * rescale + weights @ v[:, :, i : i + TILE]
            top = new_top
        return self.o_proj((numerator / denominator).transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    name="SinkAttention",
    build=lambda c: SinkAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "none", "sink": True, "bias": False},
)
