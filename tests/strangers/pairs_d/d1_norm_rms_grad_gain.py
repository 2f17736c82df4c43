import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = ("In the backward of the fused RMSNorm the projection term takes the mean of dy * x_hat without the gain, so the "
        "gradient of the input is wrong as soon as the gain is no longer all ones.")
PLACE = "backward of the RMSNorm Function, mean(dy * x_hat) for mean(dy * gain * x_hat)"
EPS = 1e-6


class FusedRMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, buggy):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        inv = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        ctx.save_for_backward(wide, gain, inv)
        ctx.buggy, ctx.kind = buggy, x.dtype
        return (wide * inv * gain.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gain, inv = ctx.saved_tensors
        dy = dy.to(x.dtype)
        hat = x * inv
        scaled = dy * gain.to(x.dtype)
        along = ((dy if ctx.buggy else scaled) * hat).mean(-1, keepdim=True)
        dx = inv * (scaled - hat * along)
        dgain = (dy * hat).flatten(0, -2).sum(0)
        return dx.to(ctx.kind), dgain.to(gain.dtype), None


class RMS(nn.Module):
    def __init__(self, d, buggy=False):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))
        self.buggy = buggy

    def forward(self, x):
        return FusedRMS.apply(x, self.gain, self.buggy)


FACTS = {"norm": "rms", "norm_bias": False, "once_differentiable": True}
right = Subject(kind="norm", build=lambda c: RMS(c.d_model), declares=FACTS, name="fused rms")
wrong = Subject(kind="norm", build=lambda c: RMS(c.d_model, True), declares=FACTS, name="fused rms")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    table = {}
    for name, gain in (("ones", torch.ones(12)), ("trained", torch.randn(12))):
        for buggy in (False, True):
            m = RMS(12, buggy).double()
            m.gain.data.copy_(gain)
            naive = x / (x.square().sum(-1, keepdim=True) / 12 + EPS).sqrt() * m.gain
            seed = torch.randn_like(naive)
            want, got = (torch.autograd.grad(y, (x, m.gain), seed) for y in (naive, m(x)))
            table[name, buggy] = [(m(x) - naive).abs().max().item()] + [
                (s - t).abs().max().item() for s, t in zip(want, got)]
    print(table)
    assert max(table["ones", False] + table["trained", False] + table["ones", True]) < 1e-12
    assert table["trained", True][0] < 1e-12 and table["trained", True][1] > 1e-2 and table["trained", True][2] < 1e-12
