WHAT = "The block before is taken with torch.roll (line 15), which wraps round: the first block also attends to the end of the last block, which is its own future."
"""A decoder with a sliding window, computed by blocks: a block of queries sees its block of keys and the one before."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def previous(t, dim):
    """What stands in the block before, along the axis of blocks."""
    return torch.roll(t, 1, dims=dim)


class LocalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        h, w = self.heads, WINDOW
        if mask is None:
            mask = torch.ones(b, t, dtype=torch.bool, device=x.device)
        pad = -t % w
        x, mask = F.pad(x, (0, 0, 0, pad)), F.pad(mask, (0, pad), value=False)
        n = x.shape[1] // w
        q, k, v = self.to_qkv(x).view(b, n, w, 3, h, d // h).permute(3, 0, 4, 1, 2, 5)  # b h n w e
        live = mask.view(b, 1, n, w)
        k = torch.cat([previous(k, 2), k], dim=3)
        v = torch.cat([previous(v, 2), v], dim=3)
        live = torch.cat([previous(live, 2), live], dim=3)
        i = torch.arange(w, device=x.device)[:, None] + w
        j = torch.arange(2 * w, device=x.device)[None, :]
        seen = (j <= i) & (i - j < w) & live[:, :, :, None, :]
        s = torch.einsum("bhnie,bhnje->bhnij", q, k) * (d // h) ** -0.5
        a = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1)
        y = torch.einsum("bhnij,bhnje->bnihe", a, v).reshape(b, n * w, d)
        return self.to_out(y[:, :t])


class LocalDecoder(nn.Module):
    def __init__(self, num_tokens, dim, heads, depth, ff, max_seq_len):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, ff), nn.GELU(), nn.Linear(ff, dim))
            self.layers.append(nn.ModuleList([nn.LayerNorm(dim), LocalAttention(dim, heads), mlp]))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, tokens, mask=None):
        x = self.token_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        for norm, attn, mlp in self.layers:
            x = x + attn(norm(x), mask)
            x = x + mlp(x)
        return self.to_logits(x)


subject = Subject(
    kind="decoder",
    name="block-local decoder",
    build=lambda c: LocalDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "window": WINDOW,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
