"""SwiGLU with a fused backward that saves the two halves alone."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = "The hand-written derivative of silu is s * (1 + a * (1 - silu(a))) where s * (1 + a * (1 - s)) belongs, s the sigmoid."
PLACE = "backward of the fused silu-and-multiply"


def slope(a):
    s = torch.sigmoid(a)
    return s * (1 + a * (1 - s))


def slope_wrong(a):
    s = torch.sigmoid(a)
    return s * (1 + a * (1 - a * s))


def make(slope):
    class SiluMul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return F.silu(a) * b

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g * b * slope(a), g * F.silu(a)

    class SwiGLU(nn.Module):
        def __init__(self, d, ff):
            super().__init__()
            self.gate, self.up = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
            self.down = nn.Linear(ff, d, bias=False)

        def forward(self, x):
            return self.down(SiluMul.apply(self.gate(x), self.up(x)))

    return Subject(kind="feed_forward", build=lambda c: SwiGLU(c.d_model, c.d_ff), forward=lambda m, x: m(x),
                   declares={"activation": "swiglu", "bias": False, "once_differentiable": True})


right, wrong = make(slope), make(slope_wrong)

if __name__ == "__main__":
    from types import SimpleNamespace as C
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = (s.build(C(d_model=8, d_ff=16)).double() for s in (right, wrong))
    z.load_state_dict(a.state_dict())
    x = torch.randn(2, 3, 8, dtype=torch.double, requires_grad=True)
    want = a.down(F.silu(a.gate(x)) * a.up(x))
    g, = torch.autograd.grad(want.pow(2).sum(), x)
    for name, m, same in (("right", a, True), ("wrong", z, False)):
        out = m(x)
        d = (torch.autograd.grad(out.pow(2).sum(), x)[0] - g).abs().max().item()
        print(name, (out - want).abs().max().item(), d)
        assert torch.allclose(out, want) and (d < 1e-9) == same
