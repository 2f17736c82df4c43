WHAT = 'blockwise sliding window: the look-back block comes from torch.roll, and what wraps round into block 0 is not masked, so the first queries see the end of the sequence (line 30)'
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class LocalAttention(nn.Module):
    """Causal attention over the last WINDOW tokens, in blocks: linear in T."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        w, h = WINDOW, self.heads
        qkv = F.pad(self.qkv(x), (0, 0, 0, -t % w))
        n = qkv.shape[1] // w
        q, k, v = qkv.reshape(b, n, w, 3, h, d // h).permute(3, 0, 4, 1, 2, 5)  # b h n w e
        k = torch.cat([k.roll(1, dims=2), k], dim=3)
        v = torch.cat([v.roll(1, dims=2), v], dim=3)
        distance = torch.arange(w)[:, None] + w - torch.arange(2 * w)
        allowed = ((distance >= 0) & (distance < w)).repeat(n, 1, 1)
        # the first block looks back at nothing, the mask of distances takes care of it
        scores = torch.einsum("bhnie,bhnje->bhnij", q, k) / (d // h) ** 0.5
        probs = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        y = torch.einsum("bhnij,bhnje->bnihe", probs, v)
        return self.out(y.reshape(b, n * w, d)[:, :t])


subject = Subject(
    kind="self_attention",
    build=lambda c: LocalAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False},
)
