WHAT = "the normaliser of linear attention sums the features of all keys instead of running over those so far: the numerator is causal, the denominator sees the future (line 26)."
"""Transformers are RNNs (Katharopoulos et al. 2020): causal linear attention with elu(x) + 1."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def phi(x):
    return F.elu(x) + 1


class CausalLinearAttention(nn.Module):
    def __init__(self, dim, heads, eps=1e-6):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.w_q, self.w_k, self.w_v, self.w_o = [nn.Linear(dim, dim) for _ in range(4)]

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = [w(x).view(b, t, self.heads, -1) for w in (self.w_q, self.w_k, self.w_v)]
        q, k = phi(q), phi(k)
        # S_t = sum over s <= t of k_s v_s^T, z_t = sum over s <= t of k_s
        s = torch.einsum("bthf,bthe->bthfe", k, v).cumsum(dim=1)
        z = torch.einsum("bthf,bhf->bth", q, k.sum(dim=1))
        y = torch.einsum("bthf,bthfe->bthe", q, s) / (z + self.eps)[..., None]
        return self.w_o(y.reshape(b, t, -1))


class LinearTransformer(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(max_len, dim) * 0.1)
        self.attn = nn.ModuleList([CausalLinearAttention(dim, heads) for _ in range(depth)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(depth)]
        )
        self.norm1 = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.norm2 = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos[: tokens.shape[1]]
        for attn, mlp, norm1, norm2 in zip(self.attn, self.mlp, self.norm1, self.norm2):
            x = x + attn(norm1(x))
            x = x + mlp(norm2(x))
        return self.to_logits(self.norm(x))


subject = Subject(
    kind="decoder",
    name="linear transformer",
    build=lambda c: LinearTransformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": True,
        "structure": "other",
    },
)
