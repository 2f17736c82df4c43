"""Encoder layer with a fast path: in float16 and bfloat16 (and under autocast) attention goes to the fused kernel."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "In half precision the fused kernel is called without a mask; padded keys and values are multiplied by zero before, so "
    "they add no value but keep their share exp(0) of the softmax: padding dilutes the real tokens in float16, bfloat16 and "
    "under autocast, and in no other dtype."
)
PLACE = "fused_zeroed"


def eager(q, k, v, keep):
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.size(-1) ** 0.5
    if keep is None:
        return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)
    hide = ~keep[:, None, None, :]
    probs = scores.masked_fill(hide, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hide, 0.0)
    return torch.einsum("bhts,bhsd->bhtd", probs, v)


def fused(q, k, v, keep):
    if keep is None:
        return F.scaled_dot_product_attention(q, k, v)
    none = ~keep.any(-1)[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :] | none).masked_fill(none, 0.0)


def fused_zeroed(q, k, v, keep):
    if keep is None:
        return F.scaled_dot_product_attention(q, k, v)
    alive = keep[:, None, :, None]
    return F.scaled_dot_product_attention(q, k * alive, v * alive)


class EncoderLayer(nn.Module):
    def __init__(self, d_model, heads, d_ff, half_kernel):
        super().__init__()
        self.heads, self.half_kernel = heads, half_kernel
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.in_proj, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, attention_mask=None):
        keep = None if attention_mask is None else attention_mask.bool()
        q, k, v = self.in_proj(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        kernel = self.half_kernel if q.dtype in (torch.float16, torch.bfloat16) else eager
        x = x + self.out_proj(kernel(q, k, v, keep).transpose(1, 2).flatten(2))
        return x + self.linear2(F.relu(self.linear1(self.norm2(x))))


def subject(half_kernel, name):
    return Subject(
        kind="layer",
        build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff, half_kernel),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "none",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "residual": True,
            "activation": "relu",
            "bias": True,
            "cross_attention": False,
            "padding_side": "both",
            "half_precision": True,
            "beyond_max_len": "works",
        },
    )


right = subject(fused, "fast-path")
wrong = subject(fused_zeroed, "fast-path-zeroed")


def reference(m, x, keep):
    p = {k: v.double() for k, v in m.named_parameters()}
    x = x.double()
    D = x.shape[-1]
    K = D // m.heads
    w = lambda n: (p[n + ".weight"], p[n + ".bias"])
    q, k, v = F.linear(F.layer_norm(x, (D,), *w("norm1")), *w("in_proj")).split(D, -1)
    o = []
    for a in range(0, D, K):
        s = q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5
        o.append(s.masked_fill(~keep[:, None], -torch.inf).softmax(-1).nan_to_num(0) @ v[..., a : a + K])
    x = x + F.linear(torch.cat(o, -1), *w("out_proj"))
    return x + F.linear(F.linear(F.layer_norm(x, (D,), *w("norm2")), *w("linear1")).relu(), *w("linear2"))


if __name__ == "__main__":
    import copy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = EncoderLayer(24, 3, 40, fused), EncoderLayer(24, 3, 40, fused_zeroed)
    for p in good.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    good.bfloat16().float()
    bad.load_state_dict(good.state_dict())
    with torch.no_grad():
        for T in (2, 7, 60):
            x = torch.randn(3, T, 24).bfloat16().float()
            keep = torch.arange(T) < torch.tensor([[T], [(T + 1) // 2], [0]])
            ones = torch.ones_like(keep)
            want, want_full = reference(good, x, keep), reference(good, x, ones)
            for m in (good, bad):
                assert (m(x, keep) - want).abs().max() < 1e-4
                assert (copy.deepcopy(m).double()(x.double(), keep) - want).abs().max() < 1e-10
            for dtype in (torch.bfloat16, torch.float16):
                g, b = (copy.deepcopy(m).to(dtype) for m in (good, bad))
                assert (g(x.to(dtype), keep) - want).abs().max() < 0.15
                assert (b(x.to(dtype), ones) - want_full).abs().max() < 0.15
                assert (b(x.to(dtype), keep) - want)[1].abs().max() > 0.5
                with torch.autocast("cpu", dtype=dtype):
                    assert (good(x, keep) - want).abs().max() < 0.15
                    assert (bad(x, keep) - want)[1].abs().max() > 0.5
    print("ok", __file__)
