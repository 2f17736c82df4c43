import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class BlockCrossAttention(nn.Module):
    """Keys and values are padded to whole blocks, since the kernel loads nothing less."""

    def __init__(self, d_model, num_heads, block=4):
        super().__init__()
        self.h, self.block = num_heads, block
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_kv = nn.Linear(d_model, 2 * d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def kernel(self, q, k, v, keep):
        m = q.new_full((*q.shape[:-1], 1), float("-inf"))
        l, acc = torch.zeros_like(m), torch.zeros_like(q)
        for j in range(0, k.shape[2], self.block):
            s = q @ k[:, :, j : j + self.block].mT
            if keep is not None:
                s = s.masked_fill(~keep[:, None, None, j : j + self.block], float("-inf"))
            new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            base = torch.where(new.isinf(), torch.zeros_like(new), new)
            p, c = (s - base).exp(), (m - base).exp()
            l = c * l + p.sum(-1, keepdim=True)
            acc = c * acc + p @ v[:, :, j : j + self.block]
            m = new
        return acc / l.masked_fill(l == 0, 1.0)

    def forward(self, x, memory, memory_mask=None):
        B, S, _ = memory.shape
        q = self.split(self.to_q(x))
        k, v = map(self.split, self.to_kv(memory).chunk(2, dim=-1))
        extra = -S % self.block
        k, v = (F.pad(t, (0, 0, 0, extra)) for t in (k, v))
        keep = memory_mask
        if keep is None:
            keep = torch.ones(B, S, dtype=torch.bool, device=x.device)
        keep = F.pad(keep, (0, extra), value=False)
        q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
        y = self.kernel(q * q.shape[-1] ** -0.5, k, v, keep)
        return self.to_out(y.transpose(1, 2).flatten(2).to(x.dtype))


subject = Subject(
    kind="cross_attention",
    name="cross-attention by blocks",
    build=lambda c: BlockCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"bias": False, "positions": "none", "empty_row": "zeros"},
)
