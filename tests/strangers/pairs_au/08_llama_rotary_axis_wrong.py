WHAT = 'rotary() is called before heads and time are exchanged (line 68): it rotates by the number of the head, not by the position'
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


@dataclass
class ModelArgs:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    hidden_dim: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    def __init__(self, dim, max_seq_len, theta):
        super().__init__()
        if dim % 2:
            raise ValueError("head dimension must be even")
        inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2).double() / dim))
        angles = torch.outer(torch.arange(max_seq_len).double(), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x):
        """Rotate the last axis of x by the index along the one before it."""
        n = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        return x * self.cos[:n] + torch.cat((-second, first), dim=-1) * self.sin[:n]


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, rotary):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)

        xq, xk = rotary(xq), rotary(xk)
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, xk, xv))

        n_rep = self.n_heads // self.n_kv_heads
        xk, xv = xk.repeat_interleave(n_rep, dim=1), xv.repeat_interleave(n_rep, dim=1)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(output.transpose(1, 2).reshape(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x, rotary):
        h = x + self.attention(self.attention_norm(x), rotary)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.rotary = Rotary(args.dim // args.n_heads, args.max_seq_len, args.rope_theta)
        self.layers = nn.ModuleList([TransformerBlock(args) for _ in range(args.n_layers)])
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.max_seq_len = args.max_seq_len

    def forward(self, tokens):
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError("sequence too long")
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.rotary)
        return self.output(self.norm(h))


subject = Subject(
    kind="decoder",
    name="small Llama",
    build=lambda c: Llama(
        ModelArgs(c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.vocab_size, c.d_ff, c.max_len)
    ),
    forward=lambda m, tokens: m(tokens),
    declares={
        "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "activation": "swiglu", "bias": False, "grouped_queries": True,
    },
)
