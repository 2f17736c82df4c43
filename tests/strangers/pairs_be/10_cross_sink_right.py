"""Cross-attention whose heads may look away: each has a learned logit beside those of the memory (GPT-OSS)."""

import torch
from torch import einsum, nn
from torch.nn.functional import pad

from veriformer.properties import Subject


class SinkCrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.dh = heads, dim // heads
        self.wq = nn.Parameter(torch.randn(dim, heads, self.dh) * dim**-0.5)
        self.wk = nn.Parameter(torch.randn(dim, heads, self.dh) * dim**-0.5)
        self.wv = nn.Parameter(torch.randn(dim, heads, self.dh) * dim**-0.5)
        self.wo = nn.Parameter(torch.randn(heads, self.dh, dim) * dim**-0.5)
        self.sink = nn.Parameter(torch.randn(heads))

    def attention_weights(self, x, memory, memory_mask=None):
        q = einsum("btd,dhk->bhtk", x, self.wq)
        k = einsum("bsd,dhk->bhsk", memory, self.wk)
        logits = einsum("bhtk,bhsk->bhts", q, k) * self.dh**-0.5
        sink = self.sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([sink, logits], dim=-1)
        if memory_mask is not None:
            visible = pad(memory_mask, (1, 0), value=True)
            logits = logits.masked_fill(~visible[:, None, None, :], float("-inf"))
        return logits.softmax(-1)[..., 1:]

    def forward(self, x, memory, memory_mask=None):
        v = einsum("bsd,dhk->bhsk", memory, self.wv)
        out = einsum("bhts,bhsk->bhtk", self.attention_weights(x, memory, memory_mask), v)
        return einsum("bhtk,hkd->btd", out, self.wo)


subject = Subject(
    kind="cross_attention",
    name="cross-attention with a sink",
    build=lambda c: SinkCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    weights=lambda m, x, memory, memory_mask=None: m.attention_weights(x, memory, memory_mask),
    declares={"sink": True, "positions": "none", "bias": False},
)
