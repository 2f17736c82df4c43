WHAT = "the absorbed path sums the latent before kv_norm for the values, the naive one the normalised latent (line 80)"
"""Multi-head latent attention of DeepSeek-V3, with both of its implementations: naive, and the absorbed one for decoding."""
from contextlib import contextmanager

import torch
from torch import nn

from veriformer.properties import Subject

attn_impl = "absorb"


@contextmanager
def implementation(name):
    global attn_impl
    before, attn_impl = attn_impl, name
    try:
        yield
    finally:
        attn_impl = before


def apply_rotary_emb(x, freqs_cis):
    # x [B, S, H, R]
    y = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(y * freqs_cis.to(y.dtype)[None, :, None, :]).flatten(3)


class MLA(nn.Module):
    def __init__(self, dim, n_heads, kv_lora_rank=6):
        super().__init__()
        self.n_heads, self.kv_lora_rank = n_heads, kv_lora_rank
        self.v_head_dim = dim // n_heads
        self.qk_rope_head_dim = self.v_head_dim // 2
        self.qk_nope_head_dim = self.v_head_dim - self.qk_rope_head_dim
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.wq = nn.Linear(dim, n_heads * self.qk_head_dim, bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=1e-6)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.wo = nn.Linear(n_heads * self.v_head_dim, dim, bias=False)
        self.softmax_scale = self.qk_head_dim**-0.5

    def freqs_cis(self, length, device):
        steps = torch.arange(0, self.qk_rope_head_dim, 2, dtype=torch.float64, device=device)
        freqs = 10000.0 ** (-steps / self.qk_rope_head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), freqs)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x, attention_mask=None):
        bsz, seqlen, _ = x.size()
        freqs_cis = self.freqs_cis(seqlen, x.device)
        q = self.wq(x).view(bsz, seqlen, self.n_heads, self.qk_head_dim)
        q_nope, q_pe = torch.split(q, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe = apply_rotary_emb(q_pe, freqs_cis)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), freqs_cis)
        latent = self.kv_norm(kv)

        if attn_impl == "naive":
            q = torch.cat([q_nope, q_pe], dim=-1)
            up = self.wkv_b(latent).view(bsz, seqlen, self.n_heads, self.qk_nope_head_dim + self.v_head_dim)
            k_nope, v = torch.split(up, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        else:
            wkv_b = self.wkv_b.weight.view(self.n_heads, -1, self.kv_lora_rank)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.qk_nope_head_dim])
            scores = torch.einsum("bshc,btc->bsht", q_nope, latent)
            scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, k_pe.squeeze(2))) * self.softmax_scale

        allowed = torch.ones(seqlen, seqlen, dtype=torch.bool, device=x.device).tril()[None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, :]
        scores = scores.masked_fill(~allowed.unsqueeze(2), torch.finfo(scores.dtype).min).softmax(dim=-1)

        if attn_impl == "naive":
            out = torch.einsum("bsht,bthd->bshd", scores, v)
        else:
            out = torch.einsum("bsht,btc->bshc", scores, kv)
            out = torch.einsum("bshc,hdc->bshd", out, wkv_b[:, -self.v_head_dim :])
        return self.wo(out.flatten(2))


subject = Subject(
    kind="self_attention",
    name="MLA",
    build=lambda c: MLA(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    backends={"naive": lambda: implementation("naive"), "absorb": lambda: implementation("absorb")},
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "attention_scale": "1/sqrt(d_head)",
        "bias": False,
        "padding_side": "both",
        "structure": "other",
    },
)
