WHAT = 'each block of the memory is masked with the first columns of the mask instead of its own: behind the first block the padding mask of the first block is repeated, padding is seen and real memory hidden (line 32)'
"""Cross-attention that streams over a long memory in blocks."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class StreamedCrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int, block: int = 3) -> None:
        super().__init__()
        self.heads, self.block = heads, block
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        q = self._heads(self.to_q(x))
        q = q * q.shape[-1] ** -0.5
        best = q.new_full((*q.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(best)
        mixed = torch.zeros_like(q)
        for begin in range(0, memory.shape[1], self.block):
            part = memory[:, begin : begin + self.block]
            k, v = (self._heads(y) for y in self.to_kv(part).chunk(2, dim=-1))
            scores = q @ k.mT
            if memory_mask is not None:
                seen = memory_mask[:, : part.shape[1]]
                scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
            newest = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            base = newest.masked_fill(newest == float("-inf"), 0.0)
            weights = (scores - base).exp()
            fade = (best - base).exp()
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed = mixed * fade + weights @ v
            best = newest
        mixed = mixed / total.masked_fill(total == 0, 1.0)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


subject = Subject(
    kind="cross_attention",
    name="streamed cross-attention",
    build=lambda c: StreamedCrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"bias": True},
)
