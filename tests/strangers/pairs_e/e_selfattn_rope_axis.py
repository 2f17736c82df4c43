"""Self-attention with rotary positions."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Queries and keys are rotated before the heads are moved in front, so that each head rather than each time step gets an angle."
PLACE = "order of rope and transpose(1, 2)"


def rope(x):  # [..., T, K]
    n, k = x.shape[-2:]
    freq = 10000.0 ** (-torch.arange(0, k, 2, device=x.device) / k)
    angle = torch.arange(n, device=x.device)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def rotate(self, z):  # [B, T, H, K] -> [B, H, T, K]
        return rope(z.transpose(1, 2))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)) for f in (self.q, self.k, self.v))
        q, k, v = self.rotate(q), self.rotate(k), v.transpose(1, 2)
        s = q @ k.mT / q.shape[-1] ** 0.5
        ok = torch.ones_like(s, dtype=torch.bool) if mask is None else mask.bool()[:, None, None].expand_as(s)
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class Early(SelfAttention):
    def rotate(self, z):
        return rope(z).transpose(1, 2)


def subject(cls):
    return Subject(kind="self_attention", build=lambda c: cls(c.d_model, c.num_heads), mask_forms=("padding",),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                   domain={"d_model": [16, 32], "num_heads": [2, 4]},
                   projections=lambda m: {n: getattr(m, n).weight for n in "qkvo"},
                   declares={"causal": False, "positions": "rotary", "layout": "halves", "bias": False,
                             "empty_row": "zeros"})


right, wrong = subject(SelfAttention), subject(Early)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = SelfAttention(16, 2), Early(16, 2)
    z.load_state_dict(a.state_dict())
    x = torch.randn(1, 5, 16)
    q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (a.q, a.k, a.v))
    freq = 10000.0 ** (-torch.arange(4) / 4)
    qc, kc = (torch.complex(*u.chunk(2, -1)) * torch.polar(torch.ones(5, 4), torch.arange(5)[:, None] * freq) for u in (q, k))
    want = a.o((((qc @ kc.conj().mT).real / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
    dr, dw = (a(x) - want).abs().max().item(), (z(x) - want).abs().max().item()
    blind = (z(x.flip(1)).flip(1) - z(x)).abs().max().item()
    print(dr, dw, "wrong one knows no order:", blind)
    assert dr < 1e-5 and dw > 1e-3 and blind < 1e-5
