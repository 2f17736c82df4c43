WHAT = "heads are folded into the batch sample-major (b h), but the padding mask is repeated head-major (h b): a sample's heads are given the masks of other samples of the batch (line 30: mask = mask.repeat(self.heads, 1))"
"""Perceiver classifier: a few latents read a long input by cross-attention, heads folded into the batch."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Attend(nn.Module):
    def __init__(self, dim, heads, cross=False):
        super().__init__()
        self.heads = heads
        self.norm_q = nn.LayerNorm(dim)
        self.norm_kv = nn.LayerNorm(dim) if cross else None
        self.to_q, self.to_kv, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim)

    def fold(self, t):
        b, n, d = t.shape
        return t.reshape(b, n, self.heads, d // self.heads).permute(0, 2, 1, 3).reshape(b * self.heads, n, d // self.heads)

    def forward(self, x, context=None, mask=None):
        b, n, d = x.shape
        q = self.norm_q(x)
        kv = q if context is None else self.norm_kv(context)
        q = self.fold(self.to_q(q))
        k, v = map(self.fold, self.to_kv(kv).chunk(2, dim=-1))
        sim = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        if mask is not None:
            mask = mask.repeat(self.heads, 1)
            sim = sim.masked_fill(~mask[:, None, :], torch.finfo(sim.dtype).min)
        out = torch.bmm(sim.softmax(dim=-1), v)
        out = out.reshape(b, self.heads, n, d // self.heads).permute(0, 2, 1, 3).reshape(b, n, d)
        return self.to_out(out)


class Mlp(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class Perceiver(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len, classes, num_latents=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.layers = nn.ModuleList(
            [nn.ModuleList([Attend(dim, heads, cross=True), Mlp(dim, hidden), Attend(dim, heads), Mlp(dim, hidden)]) for _ in range(depth)]
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, tokens, mask=None):
        data = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.latents[None].expand(tokens.shape[0], -1, -1)
        for cross, cross_ff, inner, inner_ff in self.layers:
            x = x + cross(x, data, mask)
            x = x + cross_ff(x)
            x = x + inner(x)
            x = x + inner_ff(x)
        return self.to_logits(x.mean(dim=1))


subject = Subject(
    kind="classifier",
    name="Perceiver",
    build=lambda c: Perceiver(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "other", "norm": "layer", "structure": "other",
              "padding_side": "right"},
)
