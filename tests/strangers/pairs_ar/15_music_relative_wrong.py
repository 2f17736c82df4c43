WHAT = "for sequences shorter than max_len the table's first T rows are taken (`rel = self.E[:T]`) instead of its last T: which row is distance 0 depends on the length, so outputs of a prefix change as the sequence grows"
"""Music Transformer's relative attention with the skewing trick, ported from Tensor2Tensor."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def skew(qe):
    """[.., i, r] over relative distances r = -(T-1)..0 to [.., i, j]; what lies in the future is rubbish."""
    B, H, T, _ = qe.shape
    padded = F.pad(qe, (1, 0))
    return padded.reshape(B, H, T + 1, T)[:, :, 1:]


class RelativeSelfAttention(nn.Module):
    def __init__(self, d, heads, max_len):
        super().__init__()
        self.heads, self.width, self.max_len = heads, d // heads, max_len
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        # row max_len - 1 is distance 0, row 0 the farthest past
        self.E = nn.Parameter(torch.randn(max_len, self.width))

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        if T > self.max_len:
            raise ValueError("too long")
        q, k, v = (f(x).view(B, T, self.heads, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        rel = self.E[:T]
        scores = (q @ k.mT + skew(q @ rel.T)) / math.sqrt(self.width)
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1) * allowed
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="Music Transformer attention",
    build=lambda c: RelativeSelfAttention(c.d_model, c.num_heads, c.max_len),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "relative"},
)
