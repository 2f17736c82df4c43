"""A decoder with dropout, after its attention was moved to SDPA."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "SDPA gets dropout_p=self.dropout at all times: attention weights are dropped in eval mode too."
CAUSE = "Dropout on the attention weights acts in eval mode: SDPA's dropout_p is not gated by self.training."


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))
        self.heads, self.dropout = heads, dropout

    def rate(self):
        return self.dropout if self.training else 0.0

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate())
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class SelfAttentionB(SelfAttention):
    def rate(self):
        return self.dropout


class Decoder(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.drop = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList()
        for _ in range(c.num_layers):
            feed = nn.Sequential(
                nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model), nn.Dropout(c.dropout)
            )
            pair = nn.ModuleList([attention(c.d_model, c.num_heads, c.dropout), feed])
            self.layers.append(nn.ModuleList([pair, nn.ModuleList([nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)])]))
        self.to_logits = nn.Sequential(nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size))

    def forward(self, tokens):
        x = self.drop(self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device)))
        for (attend, feed), (norm_a, norm_f) in self.layers:
            x = attend(norm_a(x)) + x
            x = feed(norm_f(x)) + x
        return self.to_logits(x)


def subject(attention):
    return Subject(
        kind="decoder",
        name="decoder with dropout",
        build=lambda c: Decoder(c, attention),
        forward=lambda m, tokens: m(tokens),
    )


right = subject(SelfAttention)
wrong = subject(SelfAttentionB)
