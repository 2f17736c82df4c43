WHAT = "with a cache the mask of a chunk of several tokens is aligned top-left (diagonal 1) in place of start_pos + 1: its queries do not see most of the cached past and themselves (line 109)"
"""LLaMA after Meta's model.py: complex rotary embedding, grouped queries, SwiGLU, RMSNorm; a cache from start_pos on."""
import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def precompute_freqs_cis(dim: int, start: int, end: int, theta: float = 10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float64)[: (dim // 2)] / dim))
    freqs = torch.outer(torch.arange(start, end, dtype=torch.float64), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor):
    x_ = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    out = x_ * freqs_cis.to(x_.dtype)[None, :, None, :]
    return torch.view_as_real(out).flatten(3)


def repeat_kv(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim).reshape(bs, slen, -1, head_dim)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, freqs_cis, mask: Optional[torch.Tensor], past: Optional[dict]):
        bsz, seqlen, _ = x.shape
        xq = apply_rotary_emb(self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim), freqs_cis)
        xk = apply_rotary_emb(self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim), freqs_cis)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        if past is not None:
            if "k" in past:
                xk, xv = torch.cat((past["k"], xk), dim=1), torch.cat((past["v"], xv), dim=1)
            past["k"], past["v"] = xk, xv
        keys = repeat_kv(xk, self.n_heads // self.n_kv_heads).transpose(1, 2)
        values = repeat_kv(xv, self.n_heads // self.n_kv_heads).transpose(1, 2)
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        output = torch.matmul(F.softmax(scores, dim=-1), values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args.d_model, args.num_heads, args.num_key_value_heads)
        self.feed_forward = FeedForward(args.d_model, args.d_ff)
        self.attention_norm, self.ffn_norm = RMSNorm(args.d_model), RMSNorm(args.d_model)

    def forward(self, x, freqs_cis, mask, past):
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask, past)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head_dim = args.d_model // args.num_heads
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.d_model)
        self.layers = nn.ModuleList([TransformerBlock(args) for _ in range(args.num_layers)])
        self.norm = RMSNorm(args.d_model)
        self.output = nn.Linear(args.d_model, args.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, start_pos: int = 0, cache: Optional[list] = None):
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = precompute_freqs_cis(self.head_dim, start_pos, start_pos + seqlen).to(tokens.device)
        mask = None
        if seqlen > 1:
            # with a cache the scores are (seqlen, start_pos + seqlen): row i may see columns up to start_pos + i
            mask = torch.full((seqlen, start_pos + seqlen), float("-inf"), device=tokens.device, dtype=h.dtype)
            mask = torch.triu(mask, diagonal=1)
        for i, layer in enumerate(self.layers):
            h = layer(h, freqs_cis, mask, None if cache is None else cache[i])
        return self.output(self.norm(h))


def cached(model, chunks):
    cache = [{} for _ in model.layers]
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, cache))
        start += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="LLaMA",
    build=Transformer,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)
