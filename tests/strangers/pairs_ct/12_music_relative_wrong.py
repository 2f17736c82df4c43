"""Self-attention with relative key vectors, by the pad-and-reshape trick (Music Transformer, BoTNet)."""
import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject

LONGEST = 128


def rel_to_abs(r):
    """[..., T, 2T - 1], offsets -(T-1) .. T-1, to [..., T, T] at key - query."""
    *lead, t, m = r.shape
    flat = F.pad(r, (0, 1)).reshape(*lead, t * (m + 1))
    flat = F.pad(flat, (0, t - 1)).reshape(*lead, t + 1, m)
    return flat[..., :t, t - 1 :]


class RelativeSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.k = heads, dim // heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        # row LONGEST - 1 is the offset 0
        self.rel = nn.Parameter(torch.randn(2 * LONGEST - 1, self.k) * self.k**-0.5)

    def forward(self, x, mask=None):
        b, t, _ = x.shape
        if t > LONGEST:
            raise ValueError(f"at most {LONGEST} frames")
        q, k, v = self.to_qkv(x).view(b, t, 3, self.h, self.k).unbind(2)
        q = q * self.k**-0.5
        rel = self.rel[: 2 * t - 1]
        logits = einsum("bihd,bjhd->bhij", q, k) + rel_to_abs(einsum("bihd,rd->bhir", q, rel))
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None, :], torch.finfo(logits.dtype).min)
        y = einsum("bhij,bjhd->bihd", logits.softmax(-1), v)
        return self.to_out(y.flatten(2))


subject = Subject(
    kind="self_attention",
    name="relative self-attention",
    build=lambda c: RelativeSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "relative", "max_len": LONGEST, "beyond_max_len": "error"},
)

WHAT = 'The first 2T - 1 rows of the table are taken, not those around the offset 0 (line 34): which vector belongs to a distance depends on the length of the sequence, padding included.'
