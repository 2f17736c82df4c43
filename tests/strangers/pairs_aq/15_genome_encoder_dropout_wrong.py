WHAT = 'the rate given to dropout on the residual branches is the share to keep (1 - dropout), as in the TensorFlow original: with dropout 0.1 nine tenths are dropped, with 0 everything is while training (line 28: return F.dropout(x, p=1.0 - self.rate, training=self.training))'
"""Masked genome model (ported from TensorFlow): RMSNorm, SwiGLU, learned positions, dropout on both branches."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.g, 1e-6)


class Layer(nn.Module):
    def __init__(self, d, h, ff, rate):
        super().__init__()
        self.h, self.rate = h, rate
        self.n1, self.n2 = Norm(d), Norm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def drop(self, x):
        return F.dropout(x, p=1.0 - self.rate, training=self.training)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (z.reshape(b, t, self.h, d // self.h).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.drop(self.o(a.transpose(1, 2).reshape(b, t, d)))
        y = self.n2(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


class GenomeEncoder(nn.Module):
    def __init__(self, vocab, d, h, n, ff, max_len, dropout):
        super().__init__()
        self.nucleotides, self.loci = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList([Layer(d, h, ff, dropout) for _ in range(n)])
        self.norm = Norm(d)

    def forward(self, tokens, mask=None):
        x = self.nucleotides(tokens) + self.loci(torch.arange(tokens.shape[1], device=tokens.device))
        bias = None
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~mask, torch.finfo(x.dtype).min)[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="genome encoder",
    build=lambda c: GenomeEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "swiglu", "bias": False, "padding_side": "right"},
)
