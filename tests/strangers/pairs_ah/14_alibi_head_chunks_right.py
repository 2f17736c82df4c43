"""ALiBi attention that goes through its heads a few at a time, so that less than all scores are in memory."""
import torch
from torch import nn

from veriformer.properties import Subject

HEADS_AT_ONCE = 2


def get_slopes(n: int) -> torch.Tensor:
    """2^(-8/n), 2^(-16/n), ... of n heads, a power of two."""
    if n & (n - 1):
        raise ValueError("a power of two is needed")
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / n) for i in range(n)], dtype=torch.float64)


class AlibiAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_model // num_heads
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (z.reshape(batch, length, self.num_heads, self.d_head).movedim(2, 1) for z in (q, k, v))
        index = torch.arange(length, device=x.device)
        distance = (index[:, None] - index[None, :]).to(x.dtype)
        future = index[None, :] > index[:, None]
        slopes = get_slopes(self.num_heads).to(x)
        pieces = []
        for lo in range(0, self.num_heads, HEADS_AT_ONCE):
            some = slice(lo, lo + HEADS_AT_ONCE)
            scores = torch.matmul(q[:, some], k[:, some].mT) / self.d_head**0.5
            scores = scores - slopes[some].view(-1, 1, 1) * distance
            weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            pieces.append(weights @ v[:, some])
        out = torch.cat(pieces, dim=1)
        return self.out_proj(out.movedim(1, 2).reshape(batch, length, width))


subject = Subject(
    kind="self_attention",
    name="ALiBi, heads in chunks",
    build=lambda c: AlibiAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    domain={"num_heads": [4, 8]},
    declares={"causal": True, "positions": "alibi", "bias": True},
)
