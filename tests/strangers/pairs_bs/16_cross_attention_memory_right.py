"""Multi-head attention over a memory, as an incremental decoder calls it."""

import torch
from torch import nn

from veriformer.properties import Subject


class EncoderDecoderAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scaling = (embed_dim // num_heads) ** -0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _project(self, memory):
        return self._shape(self.k_proj(memory)), self._shape(self.v_proj(memory))

    def _memory(self, memory):
        return self._project(memory)

    def forward(self, x, memory, memory_mask=None):
        q = self._shape(self.q_proj(x)) * self.scaling
        k, v = self._memory(memory)
        scores = torch.matmul(q, k.transpose(-1, -2))
        if memory_mask is not None:
            scores = scores.masked_fill(~memory_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        attn = torch.softmax(scores, dim=-1)
        return self.out_proj(torch.matmul(attn, v).transpose(1, 2).flatten(2))


subject = Subject(
    kind="cross_attention",
    name="encoder-decoder attention",
    build=lambda c: EncoderDecoderAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"bias": True, "positions": "none", "empty_row": "mean"},
)
