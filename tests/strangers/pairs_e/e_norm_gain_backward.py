"""RMSNorm with a fused backward."""
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = "The projection term of the input gradient uses g where g * gain belongs; right only as long as all gains are equal to one."
PLACE = "backward of the fused RMSNorm, mean term"


def with_gain(g, w):
    return g * w


def without(g, w):
    return g


def make(inner):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, eps):
            inv = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            ctx.save_for_backward(x, w, inv)
            return x * inv * w

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            x, w, inv = ctx.saved_tensors
            n = x * inv
            dx = inv * (g * w - n * (inner(g, w) * n).mean(-1, keepdim=True))
            return dx, (g * n).flatten(0, -2).sum(0), None

    class RMSNorm(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d))

        def forward(self, x):
            return Fused.apply(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight.float()
                               if x.dtype != torch.double else self.weight, 1e-6).to(x.dtype)

    return Subject(kind="norm", build=lambda c: RMSNorm(c.d_model), forward=lambda m, x: m(x),
                   declares={"norm": "rms", "norm_bias": False, "once_differentiable": True})


right, wrong = make(with_gain), make(without)

if __name__ == "__main__":
    from types import SimpleNamespace as C
    torch.set_num_threads(1), torch.manual_seed(0)
    x, r = torch.randn(2, 3, 8, dtype=torch.double, requires_grad=True), torch.randn(2, 3, 8, dtype=torch.double)
    for gain, clash in ((torch.ones(8), False), (torch.rand(8) + 0.5, True)):
        want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
        g, = torch.autograd.grad((want * r).sum(), x)
        for name, sub in (("right", right), ("wrong", wrong)):
            m = sub.build(C(d_model=8)).double()
            m.weight.data.copy_(gain)
            out = m(x)
            d = (torch.autograd.grad((out * r).sum(), x)[0] - g).abs().max().item()
            print(name, (out - want).abs().max().item(), d)
            assert torch.allclose(out, want) and (d > 1e-3) == (clash and sub is wrong)
