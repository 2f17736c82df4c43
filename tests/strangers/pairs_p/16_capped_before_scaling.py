"""Gemma 2's logit soft capping in a self-attention of its own; all products are einsums, shapes stand in their letters."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject

CAP = 5.0


def softcap(x, cap=CAP):
    return cap * torch.tanh(x / cap)


class CappedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        assert dim % heads == 0
        self.h, self.k = heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def logits(self, q, k):
        scale = self.k**-0.5
        return softcap(einsum("b t h k, b s h k -> b h t s", q, k) * scale)

    def weights(self, x, mask=None):
        t = x.shape[1]
        q, k = (w(x).unflatten(-1, (self.h, self.k)) for w in (self.wq, self.wk))
        logits = self.logits(q, k)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            allowed = (allowed & mask.bool()[:, None, None, :]) | torch.eye(t, dtype=torch.bool, device=x.device)
        return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)

    def forward(self, x, mask=None):
        v = self.wv(x).unflatten(-1, (self.h, self.k))
        heads = einsum("b h t s, b s h k -> b t h k", self.weights(x, mask), v)
        return self.wo(heads.flatten(-2))


class CappedAttentionLate(CappedAttention):
    def logits(self, q, k):
        scale = self.k**-0.5
        return softcap(einsum("b t h k, b s h k -> b h t s", q, k)) * scale


def projections(m):
    return {"q": m.wq.weight, "k": m.wk.weight, "v": m.wv.weight, "o": m.wo.weight}


def subject(cls):
    return Subject(
        kind="self_attention",
        name=cls.__name__,
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        weights=lambda m, x, attention_mask=None: m.weights(x, attention_mask),
        projections=projections,
        declares={"causal": True, "positions": "none", "soft_cap": CAP, "attention_scale": "1/sqrt(d_head)", "bias": False},
    )


right, wrong = subject(CappedAttention), subject(CappedAttentionLate)

WHAT = "The soft cap is put on the raw products q k^T, and the scale 1/sqrt(d_head) is multiplied in behind it."
CAUSE = (
    "Scores are scale * c tanh(q k^T / c) where c tanh(scale * q k^T / c) is declared: they saturate at c / sqrt(d_head) instead "
    "of c, and large ones are squashed far too early."
)
