"""A causal language model's body with a head for sequence classification on the last real token."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Norm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        h = x if x.dtype == torch.float64 else x.float()
        return (h / torch.sqrt(h.square().mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale


def rope(x):
    """x [B, H, T, K], halves."""
    T, K = x.shape[-2:]
    freq = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    angle = torch.arange(T, dtype=torch.float64, device=x.device)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DecoderBlock(nn.Module):
    def __init__(self, dim, heads, hidden, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm_a, self.norm_f = Norm(dim), Norm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, allowed):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rope(q), rope(k), v, attn_mask=allowed, dropout_p=self.p if self.training else 0.0
        )
        y = self.proj(y.transpose(1, 2).reshape(B, T, D))
        x = x + F.dropout(y, self.p, self.training)
        gate, up = self.gate_up(self.norm_f(x)).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * up), self.p, self.training)


class SequenceClassifier(nn.Module):
    def __init__(self, vocab, classes, dim, depth, heads, hidden, p=0.1):
        super().__init__()
        self.p = p
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, hidden, p) for _ in range(depth))
        self.norm = Norm(dim)
        self.score = nn.Linear(dim, classes, bias=False)

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        if mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=tokens.device)
        causal = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        # padding sees itself, so that no row is empty
        allowed = (causal & mask[:, None, :]) | torch.eye(T, dtype=torch.bool, device=tokens.device)
        allowed = allowed[:, None]
        x = F.dropout(self.embed(tokens), self.p, self.training)
        for block in self.blocks:
            x = block(x, allowed)
        last = (torch.arange(T, device=tokens.device) * mask).argmax(dim=-1)
        pooled = self.norm(x[torch.arange(B, device=tokens.device), last])
        return self.score(F.dropout(pooled, self.p, self.training))


subject = Subject(
    kind="classifier",
    name="last token",
    build=lambda c: SequenceClassifier(
        c.vocab_size, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout
    ),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    loss=lambda model, tokens, labels: F.cross_entropy(model(tokens), labels),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "pooling": "last",
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": False,
        "init": "default",
        "structure": "textbook",
        "padding_side": "both",
        "beyond_max_len": "works",
    },
)
