WHAT = "1/sqrt(d_head) is folded into the query weight but not into the query bias (line 25): the bias's part of the scores is sqrt(d_head) times too large."
"""ViT attention; the scale is folded into the query projection, which saves a pass over [B, H, T, T]."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class FoldedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)
        for linear in (self.q, self.k, self.v, self.proj):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=0.5)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, mask=None):
        s = (x.shape[-1] // self.heads) ** -0.5
        q = F.linear(x, self.q.weight * s, self.q.bias)
        q, k, v = self.split(q), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.matmul(q, k.transpose(-2, -1))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        y = torch.matmul(scores.softmax(-1), v)
        return self.proj(y.transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    name="ViT attention, folded scale",
    build=lambda c: FoldedAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": True},
    projections=lambda m: {
        "q": m.q.weight, "k": m.k.weight, "v": m.v.weight, "o": m.proj.weight,
        "q_bias": m.q.bias, "k_bias": m.k.bias, "v_bias": m.v.bias, "o_bias": m.proj.bias,
    },
)
