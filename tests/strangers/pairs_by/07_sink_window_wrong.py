WHAT = "sink tokens are or-ed in after the causal mask, so the first query sees the second token, which lies ahead of it (line 15)"
"""StreamingLLM: a sliding window of four keys and the first two tokens besides."""
import torch
from torch import nn

from veriformer.properties import Subject

WINDOW, SINKS = 4, 2


def streaming_mask(T, device):
    i = torch.arange(T, device=device).unsqueeze(1)
    j = torch.arange(T, device=device).unsqueeze(0)
    past, near, first = j <= i, i - j < WINDOW, j < SINKS
    return (past & near) | first


class StreamingAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=streaming_mask(x.shape[1], x.device))
        return self.wo(y.transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    name="streaming attention",
    build=lambda c: StreamingAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "window": WINDOW, "sink_tokens": SINKS, "positions": "none", "bias": False},
)
