"""Cross-attention over a memory in tiles of 16, padded to whole tiles, with a running maximum."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

TILE = 16


class TiledCross(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.width = heads, d // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def split(self, t):
        return t.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def forward(self, x, memory, memory_mask=None):
        S = memory.shape[1]
        q, k, v = self.split(self.wq(x)), self.split(self.wk(memory)), self.split(self.wv(memory))
        q = q * self.width**-0.5
        if memory_mask is None:
            memory_mask = torch.ones(memory.shape[:2], dtype=torch.bool, device=x.device)
        tail = -S % TILE
        k, v = F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail))
        seen = F.pad(memory_mask.bool(), (0, tail), value=False)[:, None, None]
        top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for lo in range(0, S, TILE):
            s = (q @ k[:, :, lo : lo + TILE].transpose(-1, -2)).masked_fill(~seen[..., lo : lo + TILE], -torch.inf)
            new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
            safe = torch.where(new == -torch.inf, torch.zeros_like(new), new)
            p, fade = torch.exp(s - safe), torch.exp(top - safe)
            total = total * fade + p.sum(-1, keepdim=True)
            out = out * fade + p @ v[:, :, lo : lo + TILE]
            top = new
        out = out / torch.where(total == 0, torch.ones_like(total), total)
        return self.wo(out.transpose(1, 2).flatten(2))


subject = Subject(
    kind="cross_attention",
    name="tiled memory",
    build=lambda c: TiledCross(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": True},
)
