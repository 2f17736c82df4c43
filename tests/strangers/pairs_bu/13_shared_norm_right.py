import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, norm):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ff_norm = norm, RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x, mask=None):
        h = self.attn_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        x = x + self.wo(torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v).flatten(2))
        return x + self.w2(F.gelu(self.w1(self.ff_norm(x)), approximate="tanh"))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        dim = c.d_model
        self.tokens, self.positions = nn.Embedding(c.vocab_size, dim), nn.Embedding(c.max_len, dim)
        norm = RMSNorm(dim)
        self.blocks = nn.ModuleList(Block(dim, c.num_heads, c.d_ff, RMSNorm(dim)) for _ in range(c.num_layers))
        self.norm = norm

    def forward(self, tokens, mask=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    build=Encoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "learned", "norm": "rms", "norm_placement": "pre", "final_norm": True, "bias": False,
        "activation": "gelu_tanh", "causal": False,
    },
)
