WHAT = "keys lie as [b, h, k, s] and are normalised over dim=-1, the memory's positions, instead of each key's channels: keys are no unit vectors and padded memory changes the others' keys"
"""Cross attention with cosine similarities (Swin v2 / QK-norm), einsum style."""
import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject

SCALE = 10.0


class CosineCrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, memory, memory_mask=None):
        h = self.heads
        q = self.to_q(x).unflatten(-1, (h, -1)).permute(0, 2, 1, 3)  # b h t k
        k, v = self.to_kv(memory).chunk(2, dim=-1)
        k = k.unflatten(-1, (h, -1)).permute(0, 2, 3, 1)  # b h k s: ready for the product
        v = v.unflatten(-1, (h, -1)).permute(0, 2, 1, 3)  # b h s k
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        sim = einsum("bhtk,bhks->bhts", q, k) * SCALE
        if memory_mask is not None:
            sim = sim.masked_fill(~memory_mask[:, None, None, :], torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1)
        if memory_mask is not None:
            attn = attn * memory_mask[:, None, None, :]
        out = einsum("bhts,bhsk->bhtk", attn, v)
        return self.to_out(out.permute(0, 2, 1, 3).flatten(2))


subject = Subject(
    kind="cross_attention",
    name="cosine cross attention",
    build=lambda c: CosineCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "query_key_norm": True, "attention_scale": SCALE, "bias": False},
)
