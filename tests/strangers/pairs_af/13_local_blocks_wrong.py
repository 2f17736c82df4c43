WHAT = "The block before is fetched by roll (line 13), which wraps: the first block of queries takes the last block of the sequence for its past, and the mask, which counts within the pair of blocks, lets it through."
import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def look_back(x):
    """x [B, N, W, ...]: each block behind the one before it, [B, N, 2 W, ...]."""
    before = x.roll(1, dims=1)
    return torch.cat([before, x], dim=2)


class LocalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        w, rest = WINDOW, -t % WINDOW
        real = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask
        real = F.pad(real, (0, rest), value=False).view(b, -1, w)
        qkv = F.pad(self.to_qkv(x), (0, 0, 0, rest))
        q, k, v = qkv.view(b, -1, w, 3, self.heads, d // self.heads).unbind(3)
        k, v, real = look_back(k), look_back(v), look_back(real)
        behind = torch.arange(w, 2 * w, device=x.device)[:, None] - torch.arange(2 * w, device=x.device)
        near = (behind >= 0) & (behind < w)
        allowed = near & real[:, :, None, None, :]
        sim = einsum("bnihd,bnjhd->bnhij", q, k) * (d // self.heads) ** -0.5
        attn = sim.masked_fill(~allowed, torch.finfo(sim.dtype).min).softmax(dim=-1)
        out = einsum("bnhij,bnjhd->bnihd", attn, v)
        return self.to_out(out.reshape(b, -1, d)[:, :t])


class LocalTransformer(nn.Module):
    def __init__(self, num_tokens, dim, depth, heads, d_ff, max_len):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(num_tokens, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, d_ff), nn.GELU(), nn.Linear(d_ff, dim))
            self.layers.append(nn.ModuleList([nn.LayerNorm(dim), LocalAttention(dim, heads), ff]))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, tokens, mask=None):
        x = self.token_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        for norm, attn, ff in self.layers:
            x = attn(norm(x), mask) + x
            x = ff(x) + x
        return self.to_logits(x)


subject = Subject(
    kind="decoder",
    name="local attention",
    build=lambda c: LocalTransformer(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len),
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
