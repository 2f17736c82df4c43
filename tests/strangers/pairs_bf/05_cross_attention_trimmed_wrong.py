WHAT = 'The memory is trimmed to the largest number of real tokens instead of to the last place that holds one (line 11): if memory is padded on the left or has holes, real tokens at the end are cut off.'
"""Cross-attention that does not compute on the padding which all samples of a batch share."""
import torch
from torch import nn

from veriformer.properties import Subject


def trim(memory, mask):
    """Memory and mask without the places at the end that are padding in every sample."""
    longest = max(int(mask.sum(1).max()), 1)
    return memory[:, :longest], mask[:, :longest]


class CrossAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_kv = nn.Linear(d_model, 2 * d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, memory, memory_mask=None):
        if memory_mask is not None:
            memory, memory_mask = trim(memory, memory_mask)
        B, T, D = x.shape
        q = self.to_q(x).view(B, T, self.n_heads, -1).transpose(1, 2)
        k, v = self.to_kv(memory).view(B, memory.shape[1], 2, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (q.shape[-1] ** -0.5)
        if memory_mask is not None:
            hidden = ~memory_mask[:, None, None, :]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if memory_mask is not None:
            weights = weights.masked_fill(hidden, 0.0)
        return self.to_out((weights @ v).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="cross_attention",
    name="cross-attention on trimmed memory",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": False, "empty_row": "zeros", "padding_side": "both"},
)
