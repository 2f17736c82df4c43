"""Self-attention whose queries go through in chunks, so that scores never exceed CHUNK rows (a habit from xformers)."""
import torch
import torch.nn as nn

from veriformer.properties import Subject

CHUNK = 4


class ChunkedSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        assert dim % heads == 0
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def split(self, t):
        b, n, d = t.shape
        return t.reshape(b, n, self.heads, d // self.heads).permute(0, 2, 1, 3)

    def forward(self, x, mask=None):
        """mask: [T, T] or [B, T, T], True = may attend."""
        b, t, d = x.shape
        q, k, v = map(self.split, (self.to_q(x), self.to_k(x), self.to_v(x)))
        if mask is not None:
            mask = mask.expand(b, t, t).unsqueeze(1)

        chunks = []
        for n, rows in enumerate(q.split(CHUNK, dim=2)):
            start = n * CHUNK
            sim = rows @ k.transpose(-1, -2) * self.scale
            if mask is not None:
                sim = sim.masked_fill(~mask[:, :, start : start + rows.shape[2]], torch.finfo(sim.dtype).min)
            chunks.append(sim.softmax(dim=-1) @ v)
        out = torch.cat(chunks, dim=2)
        return self.to_out(out.permute(0, 2, 1, 3).reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    name="self-attention in chunks of queries",
    build=lambda c: ChunkedSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("pairwise",),
    declares={"causal": False, "positions": "none"},
)
