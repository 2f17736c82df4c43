WHAT = 'The outputs of the chunks of queries are flattened over batch and time and joined along that axis before they are viewed as [B, T, D]: with more than one chunk and more than one sample, samples get the rows of others (lines 36 and the next).'
import math

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class ChunkedCrossAttention(nn.Module):
    """Cross-attention that takes a few queries at a time, so that [T, S] is never whole in memory."""

    def __init__(self, hidden_size: int, num_attention_heads: int, chunk_size: int = 3):
        super().__init__()
        self.num_heads, self.head_dim = num_attention_heads, hidden_size // num_attention_heads
        self.chunk_size = chunk_size
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def split_heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        bsz, tgt_len, width = hidden_states.shape
        keys = self.split_heads(self.k_proj(memory))
        values = self.split_heads(self.v_proj(memory))
        outputs = []
        for chunk in hidden_states.split(self.chunk_size, dim=1):
            queries = self.split_heads(self.q_proj(chunk)) / math.sqrt(self.head_dim)
            scores = queries @ keys.transpose(-1, -2)
            if memory_mask is not None:
                scores = scores.masked_fill(~memory_mask[:, None, None, :], torch.finfo(scores.dtype).min)
            context = (scores.softmax(dim=-1) @ values).transpose(1, 2)
            outputs.append(context.reshape(-1, width))
        attn_output = torch.cat(outputs, dim=0).view(bsz, tgt_len, width)
        return self.out_proj(attn_output)


subject = Subject(
    kind="cross_attention",
    name="cross-attention in chunks of queries",
    build=lambda c: ChunkedCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "attention_scale": "1/sqrt(d_head)", "bias": True},
)
