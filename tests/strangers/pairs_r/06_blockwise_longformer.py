"""Local attention by blocks (Longformer's chunks, lucidrains' bookkeeping): a block of queries sees itself and both neighbours."""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject

BLOCK = 4


def exists(val):
    return val is not None


def pad_to_multiple(t, multiple, dim, value=0):
    short = -t.shape[dim] % multiple
    return F.pad(t, (*(0,) * (2 * (t.ndim - 1 - dim)), 0, short), value=value)


def look_around(t, pad_value):
    """b w n ... -> b w (3 n) ...: the block before, the block, the block behind."""
    edge = torch.full_like(t[:, :1], pad_value)
    return torch.cat((torch.cat((edge, t[:, :-1]), 1), t, torch.cat((t[:, 1:], edge), 1)), dim=2)


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, tail):
        super().__init__()
        self.heads, self.scale, self.tail = heads, (dim // heads) ** -0.5, tail
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, n, d = x.shape
        x = pad_to_multiple(x, BLOCK, dim=1)
        mask = pad_to_multiple(mask, BLOCK, dim=1, value=self.tail)
        # b (w i) (h d) -> b w i h d
        q, k, v = (t.reshape(b, -1, BLOCK, self.heads, d // self.heads) for t in self.to_qkv(x).chunk(3, dim=-1))
        k, v = look_around(k, 0), look_around(v, 0)
        seen = look_around(mask.view(b, -1, BLOCK), False)[:, :, None, None, :]
        sim = einsum("b w i h d, b w j h d -> b w h i j", q, k) * self.scale
        attn = sim.masked_fill(~seen, torch.finfo(sim.dtype).min).softmax(dim=-1).masked_fill(~seen, 0.0)
        out = einsum("b w h i j, b w j h d -> b w i h d", attn, v).reshape(b, -1, d)
        return self.to_out(out[:, :n])


class LocalEncoder(nn.Module):
    def __init__(self, *, num_tokens, dim, heads, depth, ff, tail):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(dim),
                        LocalAttention(dim, heads, tail),
                        nn.LayerNorm(dim),
                        nn.Sequential(nn.Linear(dim, ff), nn.GELU(), nn.Linear(ff, dim)),
                    ]
                )
            )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, mask=None):
        if not exists(mask):
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.token_emb(tokens)
        inv_freq = 10000 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * inv_freq
        x = x + torch.cat((angle.sin(), angle.cos()), dim=-1)[:, : x.shape[-1]].to(x.dtype)
        for attn_norm, attn, ff_norm, ff in self.layers:
            x = attn(attn_norm(x), mask) + x
            x = ff(ff_norm(x)) + x
        return self.norm(x)


def local(tail):
    return Subject(
        kind="encoder",
        name="local encoder",
        build=lambda c: LocalEncoder(
            num_tokens=c.vocab_size, dim=c.d_model, heads=c.num_heads, depth=c.num_layers, ff=c.d_ff, tail=tail
        ),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"sparse": True, "padding_side": "right"},
    )


right, wrong = local(False), local(True)
WHAT = "Where a sequence is filled up to whole blocks, the mask is filled up with 'visible' instead of 'hidden'."
CAUSE = (
    "The zero vectors that LocalAttention appends to reach a multiple of the block length count as keys in the softmax of the last "
    "blocks, since pad_to_multiple of the mask puts True there; outputs at the end depend on the length modulo the block."
)
