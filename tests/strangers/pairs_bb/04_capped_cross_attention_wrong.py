WHAT = 'the soft cap is applied behind the mask (line 27): tanh brings the scores of hidden keys back from -1e38 to -cap, so that padding of the memory keeps a weight'
"""Cross-attention of a T5Gemma-like decoder: no biases, soft-capped scores, einsum."""
import torch
from torch import einsum, nn

from veriformer.properties import DrawnConfig, Subject

CAP = 5.0


class CappedCrossAttention(nn.Module):
    def __init__(self, dim, heads, cap):
        super().__init__()
        assert dim % heads == 0
        self.heads, self.cap = heads, cap
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, memory, memory_mask=None):
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        k, v = self.to_kv(memory).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = einsum("b t h d, b s h d -> b h t s", q, k) * self.scale
        if memory_mask is not None:
            scores = scores.masked_fill(~memory_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        scores = self.cap * torch.tanh(scores / self.cap)
        weights = scores.softmax(dim=-1)
        mixed = einsum("b h t s, b s h d -> b t h d", weights, v)
        return self.to_out(mixed.flatten(2))


torch.manual_seed(0)
subject = Subject(
    kind="cross_attention",
    name="capped cross-attention",
    module=CappedCrossAttention(16, 4, CAP),
    config=DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=4),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"soft_cap": CAP, "bias": False, "positions": "none"},
)
