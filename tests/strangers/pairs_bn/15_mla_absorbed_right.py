"""Multi-head latent attention, with the up-projections absorbed for decoding."""

from contextlib import contextmanager

import torch
from torch import einsum, nn

from veriformer.properties import Subject

IMPLEMENTATION = "naive"


@contextmanager
def implementation(name):
    global IMPLEMENTATION
    before, IMPLEMENTATION = IMPLEMENTATION, name
    try:
        yield
    finally:
        IMPLEMENTATION = before


class LatentAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.kv_lora_rank = 2 * self.head_dim + 1
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wkv_a = nn.Linear(dim, self.kv_lora_rank, bias=False)
        self.wkv_b = nn.Linear(self.kv_lora_rank, heads * 2 * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.softmax_scale = self.head_dim**-0.5

    def forward(self, x, attention_mask=None):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.heads, self.head_dim)
        latent = self.wkv_a(x)
        up = self.wkv_b.weight.view(self.heads, 2, self.head_dim, self.kv_lora_rank)
        up_k, up_v = up[:, 0], up[:, 1]

        if IMPLEMENTATION == "naive":
            k = einsum("bsc,hdc->bshd", latent, up_k)
            scores = einsum("bthd,bshd->bhts", q, k) * self.softmax_scale
        else:
            absorbed = einsum("bthd,hdc->bthc", q, up_k)
            scores = einsum("bthc,bsc->bhts", absorbed, latent) * self.softmax_scale

        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            itself = torch.eye(t, dtype=torch.bool, device=x.device)
            allowed = (allowed & attention_mask[:, None, None, :]) | itself
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)

        if IMPLEMENTATION == "naive":
            v = einsum("bsc,hdc->bshd", latent, up_v)
            out = einsum("bhts,bshd->bthd", weights, v)
        else:
            out = einsum("bthc,hdc->bthd", einsum("bhts,bsc->bthc", weights, latent), up_v)
        return self.wo(out.flatten(2))


subject = Subject(
    kind="self_attention",
    name="latent attention",
    build=lambda c: LatentAttention(c.d_model, c.num_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    backends={"naive": lambda: implementation("naive"), "absorbed": lambda: implementation("absorbed")},
    declares={
        "causal": True,
        "positions": "none",
        "bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "structure": "other",
    },
)
