WHAT = "positions run on through the packed row and do not start anew at each sample, so a sample's outputs depend on the lengths before it (line 51)"
"""An encoder without padding inside: real tokens of all samples lie in one row, samples are kept apart by offsets."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoid(positions, dim):
    rate = 10000.0 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    angle = positions.double()[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :dim]


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.Wqkv, self.Wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.Wi, self.Wd = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def varlen_attention(self, x, cu_seqlens):
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        outs = []
        for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:]):
            if b > a:
                w = torch.softmax(q[:, a:b] @ k[:, a:b].mT / q.shape[-1] ** 0.5, -1)
                outs.append((w @ v[:, a:b]).transpose(0, 1).flatten(1))
        return self.Wo(torch.cat(outs))

    def forward(self, x, cu_seqlens):
        x = x + self.varlen_attention(self.norm1(x), cu_seqlens)
        return x + self.Wd(F.gelu(self.Wi(self.norm2(x))))


class PackedEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed, self.dim = nn.Embedding(vocab, dim), dim
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        index = mask.flatten().nonzero().squeeze(1)
        cu_seqlens = [0, *mask.sum(1).cumsum(0).tolist()]
        x = self.embed(tokens.flatten()[index])
        position_ids = torch.arange(len(index), device=index.device)
        x = x + sinusoid(position_ids, self.dim).to(x.dtype)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return x.new_zeros(B * T, self.dim).index_copy(0, index, self.norm(x)).view(B, T, self.dim)


subject = Subject(
    kind="encoder",
    name="packed encoder",
    build=lambda c: PackedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)
