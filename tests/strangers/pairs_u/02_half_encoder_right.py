# A bidirectional encoder with a scaled, normalised token table whose padding row is zero, and learned positions.
import torch
from torch import nn
from torch.nn.functional import gelu

from veriformer.properties import Subject


class EmbeddingNorm(nn.Module):
    """Each token's vector is brought to a root mean square of 1 before positions are added; zero stays zero."""

    def __init__(self, width, eps=1e-8):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.gain


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.before_attention, self.before_mlp = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def attend(self, x, mask):
        B, T, D = x.shape
        q, k, v = (w(x).view(B, T, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))

    def forward(self, x, mask):
        x = x + self.attend(self.before_attention(x), mask)
        return x + self.down(gelu(self.up(self.before_mlp(x))))


class Encoder(nn.Module):
    def __init__(self, vocab, width, heads, hidden, depth, longest):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.embed_norm = EmbeddingNorm(width)
        self.places = nn.Parameter(torch.randn(longest, width))
        self.layers = nn.ModuleList([Layer(width, heads, hidden) for _ in range(depth)])
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens, mask=None):
        x = self.embed_norm(self.embed(tokens)) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "padding_idx": 0,
        "padding_side": "right",
    },
)
