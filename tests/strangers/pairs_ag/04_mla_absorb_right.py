"""Multi-head latent attention with its two paths: naive (decompress keys and values) and absorbed (attend in the latent)."""
from contextlib import contextmanager

import torch
from torch import nn

from veriformer.properties import Subject

NOPE, ROPE, V_DIM, RANK = 8, 4, 8, 6
attn_impl = "naive"


@contextmanager
def use(impl):
    global attn_impl
    before, attn_impl = attn_impl, impl
    try:
        yield
    finally:
        attn_impl = before


def apply_rotary(x, start=0):
    """x [b, s, h, ROPE], interleaved pairs."""
    inv = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64, device=x.device) / ROPE)
    angle = torch.outer(torch.arange(start, start + x.shape[1], dtype=torch.float64, device=x.device), inv)[None, :, None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class MLA(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq = nn.Linear(dim, n_heads * (NOPE + ROPE), bias=False)
        self.wkv_a = nn.Linear(dim, RANK + ROPE, bias=False)
        self.kv_norm = RMSNorm(RANK)
        self.wkv_b = nn.Linear(RANK, n_heads * (NOPE + V_DIM), bias=False)
        self.wo = nn.Linear(n_heads * V_DIM, dim, bias=False)
        self.softmax_scale = (NOPE + ROPE) ** -0.5

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        q = self.wq(x).view(bsz, seqlen, self.n_heads, NOPE + ROPE)
        q_nope, q_pe = q.split([NOPE, ROPE], dim=-1)
        q_pe = apply_rotary(q_pe)
        c_kv, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        k_pe = apply_rotary(k_pe.unsqueeze(2))
        latent = self.kv_norm(c_kv)
        mask = torch.full((seqlen, seqlen), float("-inf"), device=x.device, dtype=x.dtype).triu_(1)
        if attn_impl == "naive":
            kv = self.wkv_b(latent).view(bsz, seqlen, self.n_heads, NOPE + V_DIM)
            k_nope, v = kv.split([NOPE, V_DIM], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
            q = torch.cat([q_nope, q_pe], dim=-1)
            scores = torch.einsum("bshd,bthd->bhst", q, k) * self.softmax_scale
            weights = (scores + mask).softmax(dim=-1)
            out = torch.einsum("bhst,bthd->bshd", weights, v)
        else:
            wkv_b = self.wkv_b.weight.view(self.n_heads, NOPE + V_DIM, RANK)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :NOPE])
            scores = torch.einsum("bshc,btc->bhst", q_nope, latent) + torch.einsum("bshr,btr->bhst", q_pe, k_pe.squeeze(2))
            weights = (scores * self.softmax_scale + mask).softmax(dim=-1)
            out = torch.einsum("bhst,btc->bshc", weights, latent)
            out = torch.einsum("bshc,hdc->bshd", out, wkv_b[:, NOPE:])
        return self.wo(out.flatten(2))


subject = Subject(
    kind="self_attention",
    name="MLA",
    build=lambda c: MLA(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    backends={"naive": lambda: use("naive"), "absorb": lambda: use("absorb")},
    declares={"causal": True, "positions": "rotary", "layout": "interleaved", "rotary_dim": ROPE, "attention_scale": (NOPE + ROPE) ** -0.5, "bias": False},
)
