import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

W = 4


class BandedSelfAttention(nn.Module):
    """Causal window of W keys; every block of W queries looks at its own and the previous block: O(T W)."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        B, T, D = x.shape
        n = -(-T // W)
        blocks = lambda y: F.pad(y, (0, 0, 0, n * W - T)).view(B, n, W, self.h, D // self.h)
        q, k, v = blocks(self.wq(x)), blocks(self.wk(x)), blocks(self.wv(x))
        k = torch.cat((k.roll(1, dims=1), k), dim=2)
        v = torch.cat((v.roll(1, dims=1), v), dim=2)
        distance = torch.arange(W, device=x.device)[:, None] + W - torch.arange(2 * W, device=x.device)
        allowed = ((distance >= 0) & (distance < W)).repeat(n, 1, 1)
        allowed[0, :, :W] = False
        scores = torch.einsum("bnqhk,bnshk->bhnqs", q, k) / (D // self.h) ** 0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        y = torch.einsum("bhnqs,bnshk->bnqhk", weights, v)
        return self.wo(y.reshape(B, n * W, D)[:, :T])


subject = Subject(
    kind="self_attention",
    name="banded attention",
    build=lambda c: BandedSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "window": W, "positions": "none", "bias": False},
)
