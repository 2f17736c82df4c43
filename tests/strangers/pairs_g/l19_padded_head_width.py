"""Cross attention over image patches. The kernel wants head widths that are powers of two, so heads are zero-padded to one.

The instance is the one that is deployed: d_model 96, four heads of 24, up to 256 patches.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Heads are zero-padded to the next power of two for the kernel, which then divides the scores by the square root of the "
    "padded width: with heads of 24 the scale is 1/sqrt(32) instead of 1/sqrt(24) (head widths 8, 16, 32 are right)."
)
PLACE = "kernel: scale = q.shape[-1] ** -0.5 of the padded width"


def kernel(q, k, v, see, scale):
    """Stands for the GPU kernel: powers of two alone; divides by the width it is given where no scale is named."""
    assert q.shape[-1] & (q.shape[-1] - 1) == 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    if see is None:
        return torch.matmul(s.softmax(-1), v)
    return torch.matmul(s.masked_fill(~see, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~see, 0.0).to(v.dtype), v)


class PatchCrossAttention(nn.Module):
    def __init__(self, d_model, n_heads, max_len, own_scale=True):
        super().__init__()
        self.n_heads, self.max_len, self.own_scale = n_heads, max_len, own_scale
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.empty(d_model, d_model)) for _ in range(4))
        generator = torch.Generator().manual_seed(13)
        for w in self.parameters():
            nn.init.normal_(w, std=1.3 * d_model**-0.5, generator=generator)
        self.requires_grad_(True)

    def heads(self, x, w):
        return F.linear(x, w).reshape(x.shape[0], x.shape[1], self.n_heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, memory, memory_mask=None):
        if max(x.shape[1], memory.shape[1]) > self.max_len:
            raise ValueError(f"longer than {self.max_len}")
        q, k, v = self.heads(x, self.wq), self.heads(memory, self.wk), self.heads(memory, self.wv)
        width = q.shape[-1]
        fill = (1 << (width - 1).bit_length()) - width
        scale = width**-0.5 if self.own_scale else None
        q, k, v = (F.pad(u, (0, fill)) for u in (q, k, v))
        see = None if memory_mask is None else memory_mask.bool()[:, None, None, :]
        out = kernel(q, k, v, see, scale)[..., :width]
        return F.linear(out.permute(0, 2, 1, 3).reshape(x.shape), self.wo)


SIZES = DrawnConfig(d_model=96, num_heads=4, num_key_value_heads=4, num_layers=1, max_len=256)


def subject(own_scale, name):
    return Subject(
        kind="cross_attention",
        module=PatchCrossAttention(SIZES.d_model, SIZES.num_heads, SIZES.max_len, own_scale).eval(),
        config=SIZES,
        name=name,
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
        projections=lambda m: {"q": m.wq, "k": m.wk, "v": m.wv, "o": m.wo},
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "none",
            "attention_scale": "1/sqrt(d_head)",
            "bias": False,
            "empty_row": "zeros",
            "cross_attention": True,
            "padding_side": "both",
            "max_len": 256,
            "beyond_max_len": "error",
        },
    )


right = subject(True, "patches")
wrong = subject(False, "patches-padded-scale")


def reference(m, x, memory, keep):
    x, memory = x.double(), memory.double()
    wq, wk, wv, wo = (w.double() for w in (m.wq, m.wk, m.wv, m.wo))
    K = x.shape[-1] // m.n_heads
    o = []
    for h in range(m.n_heads):
        c = slice(h * K, h * K + K)
        s = (x @ wq[c].T) @ (memory @ wk[c].T).mT / K**0.5
        o.append(s.masked_fill(~keep[:, None], -torch.inf).softmax(-1).nan_to_num(0.0) @ (memory @ wv[c].T))
    return torch.cat(o, -1) @ wo.T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for d, h, same in [(8, 2, True), (16, 4, True), (64, 4, True), (64, 2, True), (96, 4, False), (80, 4, False), (96, 2, False)]:
            good, bad = (PatchCrossAttention(d, h, 256, own) for own in (True, False))
            for T, S in [(1, 2), (6, 9), (30, 200)]:
                x, memory = torch.randn(2, T, d), torch.randn(2, S, d)
                keep = torch.rand(2, S) > 0.3
                keep[0, :2] = True
                want = reference(good, x, memory, keep)
                assert (good(x, memory, keep) - want).abs().max() < 1e-4
                off = (bad(x, memory, keep) - want).abs().max()
                assert (off < 1e-4) == same and (same or off > 2e-2), (d, h, T, S, off)
                ones = torch.ones_like(keep)
                assert (good(x, memory) - reference(good, x, memory, ones)).abs().max() < 1e-4
                d64 = PatchCrossAttention(d, h, 256).double()
                d64.load_state_dict(good.state_dict())
                assert (d64(x.double(), memory.double(), keep) - want).abs().max() < 1e-10
    print("ok", __file__)
