WHAT = "torch.roll wraps round: the first block gets the last block's keys as its past and nothing hides them, so the first window of queries sees the end of the sequence (roll, line 35)."
"""Sliding-window decoder: the T x T mask was replaced by blocks of one window, each with the block before it."""

import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def exists(value):
    return value is not None


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        h, w = self.heads, self.window
        x = F.pad(x, (0, 0, 0, -t % w))
        n = x.shape[1] // w

        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (z.reshape(b, n, w, h, d // h).permute(0, 3, 1, 2, 4) for z in (q, k, v))  # b h n w k

        # keys of the block before stand in front of a block's own
        k, v = (torch.cat((z.roll(1, dims=2), z), dim=3) for z in (k, v))  # b h n 2w k
        sim = einsum("b h n i k, b h n j k -> b h n i j", q * self.scale, k)

        i = torch.arange(w, device=x.device)[:, None] + w
        j = torch.arange(2 * w, device=x.device)[None, :]
        allowed = ((j <= i) & (i - j < w)).repeat(n, 1, 1)  # n w 2w
        sim = sim.masked_fill(~allowed, -torch.finfo(sim.dtype).max)

        out = einsum("b h n i j, b h n j k -> b h n i k", sim.softmax(dim=-1), v)
        out = out.permute(0, 2, 3, 1, 4).reshape(b, n * w, d)[:, :t]
        return self.to_out(out)


class LocalTransformer(nn.Module):
    def __init__(self, *, num_tokens, dim, heads, depth, hidden, max_seq_len, window=WINDOW):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            attn = nn.Sequential(nn.LayerNorm(dim), LocalAttention(dim, heads, window))
            self.layers.append(nn.ModuleList([attn, ff]))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.to_logits(x)


subject = Subject(
    kind="decoder",
    name="decoder with a sliding window in blocks",
    build=lambda c: LocalTransformer(
        num_tokens=c.vocab_size,
        dim=c.d_model,
        heads=c.num_heads,
        depth=c.num_layers,
        hidden=c.d_ff,
        max_seq_len=c.max_len,
    ),
    forward=lambda model, tokens: model(tokens),
    declares={"window": WINDOW, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
