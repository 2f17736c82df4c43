"""Protein encoder: single and pair tracks, one triangle update, the pairs bias the attention (Evoformer in small)."""
import torch
from torch import einsum, nn

from veriformer.properties import Subject

CLIP = 8


class Triangle(nn.Module):
    """Outgoing edges: z_ij <- sum_k a_ik * b_jk, gated."""

    def __init__(self, c):
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        self.a, self.b, self.gate, self.out = (nn.Linear(c, c) for _ in range(4))

    def forward(self, z, residue):
        z = self.norm_in(z)
        edge = residue[:, None, :, None].to(z.dtype)
        a = self.a(z) * edge
        b = self.b(z) * edge
        update = einsum("bikc,bjkc->bijc", a, b)
        return torch.sigmoid(self.gate(z)) * self.out(self.norm_out(update))


class PairBiasedAttention(nn.Module):
    def __init__(self, d, h, c):
        super().__init__()
        self.h = h
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.bias = nn.Linear(c, h, bias=False)
        self.o = nn.Linear(d, d)

    def forward(self, x, z, residue):
        b, t, d = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(b, t, self.h, d // self.h) for f in (self.q, self.k, self.v))
        s = einsum("bihd,bjhd->bhij", q, k) * (d // self.h) ** -0.5
        s = s + einsum("bijh->bhij", self.bias(z))
        s = s.masked_fill(~residue[:, None, None, :], torch.finfo(s.dtype).min)
        return self.o(einsum("bhij,bjhd->bihd", s.softmax(-1), v).reshape(b, t, d))


class ProteinEncoder(nn.Module):
    def __init__(self, cfg, c=8):
        super().__init__()
        d = cfg.d_model
        self.amino = nn.Embedding(cfg.vocab_size, d)
        self.left, self.right = nn.Linear(d, c), nn.Linear(d, c)
        self.offset = nn.Embedding(2 * CLIP + 1, c)
        self.triangle = Triangle(c)
        self.attend = nn.ModuleList(PairBiasedAttention(d, cfg.num_heads, c) for _ in range(cfg.num_layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, cfg.d_ff), nn.ReLU(), nn.Linear(cfg.d_ff, d))
            for _ in range(cfg.num_layers)
        )
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens, attention_mask=None):
        residue = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.amino(tokens)
        i = torch.arange(tokens.shape[1], device=tokens.device)
        z = self.left(x)[:, :, None] + self.right(x)[:, None, :]
        z = z + self.offset((i[None, :] - i[:, None]).clamp(-CLIP, CLIP) + CLIP)
        z = z + self.triangle(z, residue)
        for attend, feed in zip(self.attend, self.feed):
            x = x + attend(x, z, residue)
            x = x + feed(x)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="protein encoder with pairs",
    build=ProteinEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False},
)
