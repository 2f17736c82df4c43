WHAT = 'The two-way part of the mask goes by the query (i < PREFIX), not by the key (j < PREFIX): prefix tokens see the whole continuation (line 13)'
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

PREFIX = 3


def prefix_mask(length, device=None):
    i = torch.arange(length, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    return (j <= i) | (i < PREFIX)


class PrefixLM(nn.Module):
    def __init__(self, vocab, d, heads, depth, ff, max_len):
        super().__init__()
        self.heads, self.depth = heads, depth
        p = {"tok": (vocab, d), "pos": (max_len, d)}
        for l in range(depth):
            p |= {f"{l}_qkv": (3 * d, d), f"{l}_o": (d, d), f"{l}_up": (ff, d), f"{l}_down": (d, ff)}
        self.p = nn.ParameterDict({k: nn.Parameter(torch.randn(s) / s[1] ** 0.5) for k, s in p.items()})
        self.g = nn.ParameterDict({str(n): nn.Parameter(torch.ones(d)) for n in range(2 * depth + 1)})

    def norm(self, x, n):
        return F.rms_norm(x, x.shape[-1:], self.g[str(n)], 1e-6)

    def forward(self, ids):
        b, t = ids.shape
        x = F.embedding(ids, self.p["tok"]) + self.p["pos"][:t]
        seen = prefix_mask(t, ids.device)
        for l in range(self.depth):
            q, k, v = F.linear(self.norm(x, 2 * l), self.p[f"{l}_qkv"]).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + F.linear(y.transpose(1, 2).flatten(2), self.p[f"{l}_o"])
            x = x + F.linear(F.gelu(F.linear(self.norm(x, 2 * l + 1), self.p[f"{l}_up"])), self.p[f"{l}_down"])
        return F.linear(self.norm(x, 2 * self.depth), self.p["tok"])


subject = Subject(
    kind="decoder", name="prefix lm",
    build=lambda c: PrefixLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={"prefix": PREFIX, "positions": "learned", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "bias": False, "tied": True},
)
