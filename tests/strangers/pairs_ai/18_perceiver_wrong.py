WHAT = "the second and later reads of the input go without the padding mask; only the first one has it: line 50"
"""Perceiver: a few latents read a long input, think, and read it again."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

LATENTS = 5


class Read(nn.Module):
    """Attention of `x` to `context`, with a feed-forward network; pre-norm."""

    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_context, self.norm_ff = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, context, mask=None):
        normed = self.norm_context(context)
        q, (k, v) = self.to_q(self.norm(x)), self.to_kv(normed).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], torch.finfo(sim.dtype).min)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        return x + self.ff(self.norm_ff(x))


class Perceiver(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len, classes):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.latents = nn.Parameter(torch.randn(LATENTS, dim))
        self.read = Read(dim, heads, hidden)
        self.think = nn.ModuleList([Read(dim, heads, hidden) for _ in range(depth)])
        self.reread = nn.ModuleList([Read(dim, heads, hidden) for _ in range(depth)])
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, tokens, mask=None):
        data = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.read(self.latents.expand(tokens.shape[0], -1, -1), data, mask)
        for think, reread in zip(self.think, self.reread):
            x = think(x, x)
            x = reread(x, data)
        return self.to_logits(x.mean(dim=1))


subject = Subject(
    kind="classifier",
    name="Perceiver",
    build=lambda c: Perceiver(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "pooling": "other",
        "output_bias": True,
        "structure": "other",
        "padding_side": "right",
    },
)
