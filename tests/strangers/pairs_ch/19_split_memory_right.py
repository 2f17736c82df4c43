"""Cross attention with the memory in splits (flash decoding): partial softmaxes, merged at the end."""
import torch
from torch import nn

from veriformer.properties import Subject

SPLIT = 4


class SplitCrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, memory, memory_mask=None):
        b, t, d = x.shape
        s = memory.shape[1]
        q = self.to_q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.to_kv(memory).view(b, s, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        hidden = memory.new_zeros(b, s, dtype=torch.bool) if memory_mask is None else ~memory_mask
        parts, logs = [], []
        for keys, values, gone in zip(k.split(SPLIT, 2), v.split(SPLIT, 2), hidden.split(SPLIT, 1)):
            scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(gone[:, None, None], float("-inf"))
            top = scores.detach().amax(-1, keepdim=True)
            p = (scores - top.masked_fill(top == float("-inf"), 0.0)).exp()
            norm = p.sum(-1, keepdim=True).clamp(min=1)  # 0 if all are hidden, else at least 1
            parts.append(p @ values / norm)
            logs.append(top + norm.log())
        share = torch.stack(logs).clamp(min=torch.finfo(x.dtype).min).softmax(0)
        y = (torch.stack(parts) * share).sum(0)
        return self.to_out(y.transpose(1, 2).reshape(b, t, d))


subject = Subject(
    kind="cross_attention",
    name="memory in splits",
    build=lambda c: SplitCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
)
