"""Sliding-window attention in chunks: each chunk sees itself and the one before."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "The previous chunk of keys comes from torch.roll, so the first chunk wraps around and attends to the last."
PLACE = "gathering of the chunk before"
W = 4


def before(z):  # [B, H, N, W, *] -> the chunk before; nothing stands before the first
    return torch.cat([torch.zeros_like(z[:, :, :1]), z[:, :, :-1]], 2)


def rolled(z):
    return torch.roll(z, 1, dims=2)


class Local(nn.Module):
    def __init__(self, d, h, prev):
        super().__init__()
        self.h, self.prev = h, prev
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        mask = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        x, valid = F.pad(x, (0, 0, 0, -t % W)), F.pad(mask, (0, -t % W))[:, None, :, None]
        q, k, v = self.qkv(x).view(b, -1, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        q, k, v, valid = (z.unflatten(2, (-1, W)) for z in (q, k, v, valid))
        k, v, valid = (torch.cat([self.prev(z), z], 3) for z in (k, v, valid))
        gap = torch.arange(W)[:, None] - torch.arange(-W, W)
        ok = ((gap >= 0) & (gap < W)).to(x.device) & valid.mT
        s = q @ k.mT * (d // self.h) ** -0.5
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return self.out((w @ v).flatten(2, 3).transpose(1, 2).flatten(2)[:, :t])


def subject(prev):
    return Subject(kind="self_attention", build=lambda c: Local(c.d_model, c.num_heads, prev),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "window": W, "positions": "none", "empty_row": "zeros"})


right, wrong = subject(before), subject(rolled)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Local(16, 2, before), Local(16, 2, rolled)
    z.load_state_dict(a.state_dict())
    x = torch.randn(2, 11, 16)
    q, k, v = a.qkv(x).view(2, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
    g = torch.arange(11)[:, None] - torch.arange(11)
    s = (q @ k.mT / 8 ** 0.5).masked_fill((g < 0) | (g >= W), float("-inf"))
    want = a.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
    dr, dw = (a(x) - want).abs().max().item(), (z(x) - want).abs().amax((0, 2))
    print(dr, dw.tolist())
    assert dr < 1e-5 and dw[:3].max() > 1e-2 and dw[4:].max() < 1e-5
