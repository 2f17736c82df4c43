# Llama, the way its authors write it: complex rotations, start_pos, n_heads first come after seqlen.
import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


@dataclass
class ModelArgs:
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    hidden_dim: int = 11008
    vocab_size: int = -1
    norm_eps: float = 1e-5
    max_seq_len: int = 2048


class RMSNorm(torch.nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return self._norm(wide).type_as(x) * self.weight


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).double() / dim))
    angles = torch.outer(torch.arange(end).double(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    def rotate(x):
        wide = x if x.dtype == torch.float64 else x.float()
        x_ = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2))
        turned = x_ * freqs_cis[None, :, None, :].to(x_.dtype)
        return torch.view_as_real(turned).flatten(3).type_as(x)

    return rotate(xq), rotate(xk)


class KVCache:
    """The keys and values of all layers, [bsz, seen, n_heads, head_dim] each."""

    def __init__(self, n_layers: int):
        self.slots: List[Optional[Tuple[torch.Tensor, torch.Tensor]]] = [None] * n_layers

    def extend(self, layer_id: int, xk: torch.Tensor, xv: torch.Tensor):
        if self.slots[layer_id] is not None:
            past_k, past_v = self.slots[layer_id]
            xk, xv = torch.cat([past_k, xk], dim=1), torch.cat([past_v, xv], dim=1)
        self.slots[layer_id] = (xk, xv)
        return xk, xv

    def reorder(self, order: torch.Tensor):
        self.slots = [None if slot is None else (slot[0][order], slot[1][order]) for slot in self.slots]


class Attention(nn.Module):
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.layer_id = layer_id
        self.n_heads = args.n_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, freqs_cis, mask, cache: Optional[KVCache]):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=freqs_cis)
        if cache is not None:
            xk, xv = cache.extend(self.layer_id, xk, xv)
        xq, keys, values = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.attention = Attention(layer_id, args)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x, freqs_cis, mask, cache):
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask, cache)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, params: ModelArgs):
        super().__init__()
        self.params = params
        self.tok_embeddings = nn.Embedding(params.vocab_size, params.dim)
        self.layers = nn.ModuleList([TransformerBlock(i, params) for i in range(params.n_layers)])
        self.norm = RMSNorm(params.dim, eps=params.norm_eps)
        self.output = nn.Linear(params.dim, params.vocab_size, bias=False)
        self.freqs_cis = precompute_freqs_cis(params.dim // params.n_heads, params.max_seq_len)

    def forward(self, tokens: torch.Tensor, start_pos: int = 0, cache: Optional[KVCache] = None):
        _bsz, seqlen = tokens.shape
        if start_pos + seqlen > self.params.max_seq_len:
            raise ValueError(f"{start_pos + seqlen} tokens, the model has {self.params.max_seq_len}")
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[:seqlen].to(h.device)

        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1)
            mask = torch.hstack([torch.zeros((seqlen, start_pos), device=tokens.device), mask]).type_as(h)

        for layer in self.layers:
            h = layer(h, freqs_cis, mask, cache)
        return self.output(self.norm(h))


@torch.no_grad()
def generate(model: Transformer, tokens: torch.Tensor, steps: int, use_cache: bool):
    cache = KVCache(model.params.n_layers) if use_cache else None
    prev_pos = 0
    for cur_pos in range(tokens.shape[1], tokens.shape[1] + steps):
        logits = model(tokens[:, prev_pos:cur_pos], prev_pos, cache)
        next_token = torch.argmax(logits[:, -1], dim=-1, keepdim=True)
        tokens = torch.cat([tokens, next_token], dim=1)
        if use_cache:
            prev_pos = cur_pos
    return tokens


def in_chunks(model, chunks, reorder=None):
    cache = KVCache(model.params.n_layers)
    outputs, start_pos = [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start_pos, cache))
        if start_pos == 0 and reorder is not None:
            cache.reorder(reorder)
        start_pos += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="llama (meta)",
    build=lambda c: Transformer(ModelArgs(c.d_model, c.num_layers, c.num_heads, c.d_ff, c.vocab_size, 1e-5, c.max_len)),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    forward=lambda model, tokens: model(tokens),
    cache=in_chunks,
    generate=generate,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": False,
        "embedding_scale": False,
        "init": "default",
        "structure": "textbook",
        "memory": "quadratic",
        "beyond_max_len": "error",
    },
)
