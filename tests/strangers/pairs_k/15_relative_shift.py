"""Self-attention with relative positions by Shaw's embeddings and Transformer-XL's shift, in both directions."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "After the relative shift the last T columns are kept instead of the first T: the relative terms are misaligned."
CAUSE = (
    "The relative shift is sliced on the wrong side: keys behind a query get the embedding of a distance that is T - 1 off "
    "(it changes with the length), keys ahead that of the next query, so a query's weights depend on another query."
)


def make(keep):
    class RelativeSelfAttention(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.heads, self.d_head, self.reach = c.num_heads, c.d_model // c.num_heads, c.max_len - 1
            self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
            self.relative = nn.Parameter(torch.randn(2 * self.reach + 1, self.d_head))

        def forward(self, x, attention_mask=None):
            B, T, D = x.shape
            q, k, v = (f(x).view(B, T, self.heads, self.d_head).transpose(1, 2) for f in (self.q, self.k, self.v))
            distance = torch.arange(1 - T, T, device=x.device).clamp(-self.reach, self.reach)
            by_distance = q @ self.relative[distance + self.reach].T  # [B, H, T, 2T - 1]: from T - 1 back to T - 1 ahead
            scores = (q @ k.transpose(-2, -1) + self.shift(by_distance)) * self.d_head**-0.5
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(scores.dtype).min)
            return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))

        def shift(self, s):
            B, H, T, W = s.shape
            s = torch.cat((s.new_zeros(B, H, T, 1), s), dim=-1).view(B, H, W + 1, T)
            return s[:, :, 1:].reshape(B, H, T, W)[..., keep(T)]

    return RelativeSelfAttention


def subject(keep):
    return Subject(
        kind="self_attention",
        name="relative self-attention",
        build=make(keep),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        projections=lambda m: {
            **{n: getattr(m, n).weight for n in "qkvo"},
            **{f"{n}_bias": getattr(m, n).bias for n in "qkvo"},
        },
        mask_forms=("padding",),
        declares={"causal": False, "positions": "relative"},
    )


right = subject(lambda T: slice(None, T))
wrong = subject(lambda T: slice(-T, None))
