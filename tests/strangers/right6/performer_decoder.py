"""Performer: positive random features of normalised queries and keys, causal by running sums."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def orthogonal_rows(rows, columns, generator):
    blocks = []
    for _ in range(-(-rows // columns)):
        q, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))
        blocks.append(q.t())
    length = torch.randn(rows, columns, generator=generator, dtype=torch.float64).norm(dim=1)
    return (torch.cat(blocks)[:rows] * length[:, None]).float()


class FavorAttention(nn.Module):
    def __init__(self, d, h, seed, features=16):
        super().__init__()
        self.h, k = h, d // h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("omega", orthogonal_rows(features, k, generator))

    def phi(self, x):
        """exp(w.x - |x|^2 / 2) / sqrt(m), x of length K^(1/4): E[phi(q).phi(k)] = exp(q.k), no stabiliser needed."""
        x = F.normalize(x, dim=-1, eps=1e-6) * x.shape[-1] ** 0.25
        m = self.omega.shape[0]
        return (x @ self.omega.to(x.dtype).t() - x.pow(2).sum(-1, keepdim=True) / 2).exp() * m**-0.5

    def forward(self, x, real):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.phi(q), self.phi(k)
        if real is not None:
            k = k * real[:, None, :, None]
        state = (k[..., :, None] * v[..., None, :]).cumsum(2)
        above = (q[..., None, :] @ state).squeeze(-2)
        below = (q * k.cumsum(2)).sum(-1, keepdim=True)
        y = above / torch.where(below == 0, torch.ones_like(below), below)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d, h, f, p, seed):
        super().__init__()
        self.n1, self.n2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(p)
        self.attention = FavorAttention(d, h, seed)
        self.ff = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Dropout(p), nn.Linear(f, d))

    def forward(self, x, real):
        x = x + self.drop(self.attention(self.n1(x), real))
        return x + self.drop(self.ff(self.n2(x)))


class Performer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            [Layer(c.d_model, c.num_heads, c.d_ff, c.dropout, i) for i in range(c.num_layers)]
        )
        self.norm, self.to_out = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, x, mask=None):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.to_out(self.norm(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="Performer", build=Performer, forward=forward,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "residual": True, "activation": "gelu", "bias": True, "output_bias": True, "tied": False,
        "padding_side": "right", "beyond_max_len": "error", "query_key_norm": True, "structure": "other", "memory": "linear",
        "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=Performer, forward=forward)
