"""Multi-head self-attention by bmm over B * heads, which takes a mask of its own for every sample."""

import torch
from torch import nn

from veriformer.properties import Subject


def mha(to_heads):
    class BmmAttention(nn.Module):
        def __init__(self, embed_dim, num_heads):
            super().__init__()
            self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
            self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
            self.out_proj = nn.Linear(embed_dim, embed_dim)

        def forward(self, x, attn_mask=None):
            bsz, n, d = x.shape
            q, k, v = self.in_proj(x).chunk(3, dim=-1)
            shape = lambda t: t.reshape(bsz, n, self.num_heads, self.head_dim).transpose(1, 2).reshape(-1, n, self.head_dim)
            q, k, v = shape(q) * self.head_dim**-0.5, shape(k), shape(v)
            w = torch.bmm(q, k.transpose(1, 2))
            if attn_mask is not None:
                if attn_mask.dim() == 2:
                    attn_mask = attn_mask.expand(bsz, n, n)
                w = w.masked_fill(~to_heads(attn_mask, self.num_heads), torch.finfo(w.dtype).min)
            y = torch.bmm(torch.softmax(w, dim=-1), v)
            return self.out_proj(y.view(bsz, self.num_heads, n, self.head_dim).transpose(1, 2).reshape(bsz, n, d))

    return BmmAttention


def subject(cls):
    return Subject(
        kind="self_attention",
        name="bmm attention",
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        mask_forms=("pairwise",),
        declares={"causal": False, "positions": "none", "empty_row": "mean"},
    )


right = subject(mha(lambda mask, h: mask.repeat_interleave(h, dim=0)))
wrong = subject(mha(lambda mask, h: mask.repeat(h, 1, 1)))
WHAT = "per-sample masks are tiled (repeat) where batch * heads is sample-major: heads get other samples' masks"
CAUSE = (
    "Masks [B, T, S] are repeated head-major while scores are laid out sample-major, so with B > 1 and several heads some heads "
    "of a sample use the mask of another sample."
)
