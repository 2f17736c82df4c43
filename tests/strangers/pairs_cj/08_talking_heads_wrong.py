"""Talking-heads attention (Shazeer et al. 2020): heads are mixed before and after the softmax."""
import torch
from torch import nn

from veriformer.properties import Subject


class TalkingHeads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.dim_head = heads, dim // heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)
        self.pre = nn.Parameter(torch.randn(heads, heads) * heads**-0.5)
        self.post = nn.Parameter(torch.randn(heads, heads) * heads**-0.5)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = (f(x).reshape(b, n, self.heads, self.dim_head).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        hidden = torch.zeros(b, 1, 1, n, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            hidden = ~attention_mask.bool()[:, None, None, :]
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.dim_head**-0.5
        low = max(-1e9, torch.finfo(dots.dtype).min)
        dots = dots.masked_fill(hidden, low)
        dots = torch.einsum("bhij,gh->bgij", dots, self.pre)
        attn = dots.softmax(dim=-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        attn = torch.einsum("bhij,gh->bgij", attn, self.post)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


subject = Subject(
    kind="self_attention",
    build=lambda c: TalkingHeads(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none"},
)

WHAT = 'The mask is filled in before the heads are mixed: a head whose mixing weights sum to a negative number turns -1e9 into a large positive score, and attends to nothing but padding (line 25).'
