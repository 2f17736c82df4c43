"""Self-attention with Shaw's clipped relative keys and values."""
import torch
from torch import nn
from veriformer.properties import Subject

class Shaw(nn.Module):
    def __init__(self, c, clip=3):
        super().__init__()
        self.h, self.clip, hd = c.num_heads, clip, c.d_model // c.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.rk, self.rv = nn.Embedding(2 * clip + 1, hd), nn.Embedding(2 * clip + 1, hd)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        q, k, v = (p(x).view(B, T, self.h, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        i = torch.arange(T, device=x.device)
        rel = (i[None] - i[:, None]).clamp(-self.clip, self.clip) + self.clip
        s = (q @ k.mT + torch.einsum("bhtd,tsd->bhts", q, self.rk(rel))) * q.shape[-1] ** -0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], -1e9)
        p = s.softmax(-1)
        y = p @ v + torch.einsum("bhts,tsd->bhtd", p, self.rv(rel))
        return self.o(y.transpose(1, 2).reshape(B, T, D))

common = dict(kind="self_attention", build=Shaw, mask_forms=("padding",), forward=lambda m, x, attention_mask=None: m(x, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": False, "positions": "relative", "bias": True, "padding_side": "both"})
