"""ALiBi decoder on the fused kernel."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def alibi(h, T, like):
    slope = 2.0 ** (-8.0 * torch.arange(1, h + 1, device=like.device, dtype=like.dtype) / h)
    t = torch.arange(T, device=like.device)
    back = (t[:, None] - t[None, :]).to(like.dtype)
    bias = -slope[:, None, None] * back
    return bias.masked_fill(back < 0, float("-inf"))[None]


class Block(nn.Module):
    def __init__(self, d, h, d_ff):
        super().__init__()
        self.h, self.scale = h, (d // h) ** -0.5
        self.ln_a, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d))

    def attend(self, x):
        B, T, D = x.shape
        heads = lambda t: t.view(B, T, self.h, D // self.h).transpose(1, 2)
        k, v = self.kv(x).chunk(2, dim=-1)
        q, k, v = heads(self.q(x)) * self.scale, heads(k), heads(v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=alibi(self.h, T, x), scale=1.0)
        return self.o(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x):
        x = x + self.attend(self.ln_a(x))
        return x + self.ff(self.ln_f(x))


class AlibiLM(nn.Module):
    def __init__(self, vocab, d, h, n, d_ff):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.Sequential(*[Block(d, h, d_ff) for _ in range(n)])
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens):
        return self.head(self.ln(self.blocks(self.emb(tokens))))


subject = Subject(
    kind="decoder",
    name="ALiBi LM",
    build=lambda c: AlibiLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    domain={"num_heads": [2, 4]},
    declares={"causal": True, "positions": "alibi", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "output_bias": False},
)
