import math
import torch
from torch import nn
from veriformer.properties import Subject


def partial(q, k, v, visible):
    """One shard of keys: normalised output and log2 of the sum of exponentials."""
    s = q @ k.mT * (math.log2(math.e) / math.sqrt(q.shape[-1]))
    s = s.masked_fill(~visible, float("-inf"))
    m = s.amax(-1, keepdim=True)
    m = torch.where(m.isinf(), torch.zeros_like(m), m).detach()
    p = torch.exp2(s - m)
    z = p.sum(-1, keepdim=True)
    seen = z > 0
    safe = torch.where(seen, z, torch.ones_like(z))
    return p @ v / safe, torch.where(seen, m + safe.log2(), torch.full_like(z, float("-inf")))


def merge(parts):
    top = torch.stack([lse for _, lse in parts]).amax(0)
    top = torch.where(top.isinf(), torch.zeros_like(top), top).detach()
    shares = [torch.exp2(lse - top) for _, lse in parts]
    total = sum(shares).clamp(min=torch.finfo(top.dtype).tiny)
    return sum(out * share for (out, _), share in zip(parts, shares)) / total


class SplitCrossAttention(nn.Module):
    def __init__(self, dim, heads, shards=2):
        super().__init__()
        self.heads, self.shards = heads, shards
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, memory, memory_mask=None):
        B, T, D = x.shape
        S = memory.shape[1]
        q = self.q(x).view(B, T, self.heads, -1).transpose(1, 2)
        k, v = self.kv(memory).view(B, S, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        if memory_mask is None:
            memory_mask = torch.ones(B, S, dtype=torch.bool, device=x.device)
        size = -(-S // self.shards)
        parts = [partial(q, k[:, :, i : i + size], v[:, :, i : i + size], memory_mask[:, None, None, i : i + size])
                 for i in range(0, S, size)]
        return self.o(merge(parts).transpose(1, 2).reshape(B, T, D))


def projections(m):
    k, v = m.kv.weight.chunk(2, 0)
    kb, vb = m.kv.bias.chunk(2, 0)
    return {"q": m.q.weight, "k": k, "v": v, "o": m.o.weight, "q_bias": m.q.bias, "k_bias": kb, "v_bias": vb, "o_bias": m.o.bias}


subject = Subject(kind="cross_attention", build=lambda c: SplitCrossAttention(c.d_model, c.num_heads),
                  forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask), projections=projections,
                  declares={"bias": True})
