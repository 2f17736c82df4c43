"""Encoder with the relative positions of Shaw et al. 2018 (arXiv:1803.02155), equations 3 to 5:

    e_ij = x_i W^Q (x_j W^K + a^K_ij)^T / sqrt(d_z),    z_i = sum_j alpha_ij (x_j W^V + a^V_ij),

with a_ij = w_clip(j - i, -k, k)."""

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeSelfAttention(nn.Module):
    def __init__(self, dim, heads, clip):
        super().__init__()
        self.heads, self.dim_head, self.clip = heads, dim // heads, clip
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.rel_k = nn.Embedding(2 * clip + 1, self.dim_head)
        self.rel_v = nn.Embedding(2 * clip + 1, self.dim_head)

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, self.dim_head).unbind(2)
        place = torch.arange(n, device=x.device)
        index = (place[None, :] - place[:, None]).clamp(-self.clip, self.clip) + self.clip
        a_k, a_v = self.rel_k(index), self.rel_v(index)

        content = torch.einsum("bihd,bjhd->bhij", q, k)
        position = torch.einsum("bihd,ijd->bhij", q, a_k)
        sim = (content + position) * self.dim_head**-0.5
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bjhd->bihd", attn, v) + torch.einsum("bhij,ijd->bihd", attn, a_v)
        return self.to_out(out.reshape(b, n, -1))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, clip, dropout):
        super().__init__()
        self.attn = RelativeSelfAttention(dim, heads, clip)
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.drop = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = self.norms[0](x + self.drop(self.attn(x, mask)))
        return self.norms[1](x + self.drop(self.net(x)))


class RelativeEncoder(nn.Module):
    def __init__(self, num_tokens, dim, depth, heads, hidden, clip=4, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden, clip, dropout) for _ in range(depth)])

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return x


subject = Subject(
    kind="encoder",
    name="shaw encoder",
    build=lambda c: RelativeEncoder(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, dropout=c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "relative",
        "bidirectional": True,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": False,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "relu",
        "memory": "quadratic",
        "padding_side": "both",
        "structure": "other",
    },
)
