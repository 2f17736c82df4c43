"""Multi-head Latent Attention (DeepSeek-V2, section 2.1) in a small decoder."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


@dataclass
class ModelArgs:
    vocab_size: int
    dim: int
    n_heads: int
    n_layers: int
    inter_dim: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def precompute_freqs_cis(args, seqlen, device):
    dim = args.qk_rope_head_dim
    freqs = args.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angles = torch.outer(torch.arange(seqlen, dtype=torch.float64, device=device), freqs)
    return angles.cos(), angles.sin()


def apply_rotary_emb(x, cos, sin):
    """x [b, s, h, r], pairs of neighbours."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class MLA(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.qk_head_dim = args.qk_nope_head_dim + args.qk_rope_head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * self.qk_head_dim, bias=False)
        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(args.kv_lora_rank)
        self.wkv_b = nn.Linear(args.kv_lora_rank, args.n_heads * (args.qk_nope_head_dim + args.v_head_dim), bias=False)
        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        self.softmax_scale = self.qk_head_dim**-0.5

    def forward(self, x, rope, mask):
        a = self.args
        bsz, seqlen, _ = x.shape
        q = self.wq(x).view(bsz, seqlen, a.n_heads, self.qk_head_dim)
        q_nope, q_pe = q.split([a.qk_nope_head_dim, a.qk_rope_head_dim], dim=-1)
        q_pe = apply_rotary_emb(q_pe, *rope)
        latent, k_pe = self.wkv_a(x).split([a.kv_lora_rank, a.qk_rope_head_dim], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), *rope)
        kv = self.wkv_b(self.kv_norm(latent)).view(bsz, seqlen, a.n_heads, -1)
        k_nope, v = kv.split([a.qk_nope_head_dim, a.v_head_dim], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, a.n_heads, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        scores = scores.masked_fill(~mask.unsqueeze(2), torch.finfo(scores.dtype).min)
        out = torch.einsum("bsht,bthd->bshd", scores.softmax(dim=-1), v)
        return self.wo(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, dim, inter_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, inter_dim, bias=False)
        self.w2 = nn.Linear(inter_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, inter_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attn, self.ffn = MLA(args), MLP(args.dim, args.inter_dim)
        self.attn_norm, self.ffn_norm = RMSNorm(args.dim), RMSNorm(args.dim)

    def forward(self, x, rope, mask):
        x = x + self.attn(self.attn_norm(x), rope, mask)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        if args.qk_nope_head_dim < 1:
            raise ValueError("the head is too narrow to be split")
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList([Block(args) for _ in range(args.n_layers)])
        self.norm = RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        seqlen = tokens.size(1)
        mask = torch.tril(torch.ones(seqlen, seqlen, dtype=torch.bool, device=tokens.device))[None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, :]
        rope = precompute_freqs_cis(self.args, seqlen, tokens.device)
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, rope, mask)
        return self.head(self.norm(h))


def build(c):
    # content and rotary part together have the usual width of a head
    return Transformer(
        ModelArgs(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.d_head - 2, 2, c.d_head, c.d_model)
    )


subject = Subject(
    kind="decoder",
    name="DeepSeek MLA",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "attention_scale": "1/sqrt(d_head)",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "structure": "other",
        "padding_side": "both",
    },
)
