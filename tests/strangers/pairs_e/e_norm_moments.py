"""LayerNorm in one pass."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "The variance is E[x^2] - E[x]^2 in the input's precision, which cancels to noise where the mean is large beside the spread."
PLACE = "variance of the layer norm"


def two_pass(x):
    mean = x.mean(-1, keepdim=True)
    return mean, (x - mean).square().mean(-1, keepdim=True)


def moments(x):
    mean = x.mean(-1, keepdim=True)
    return mean, (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)


class Norm(nn.Module):
    def __init__(self, d, stats, eps=1e-5):
        super().__init__()
        self.stats, self.eps = stats, eps
        self.gain, self.shift = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var = self.stats(wide)
        y = (wide - mean) * torch.rsqrt(var + self.eps)
        return y.to(x.dtype) * self.gain + self.shift


def subject(stats):
    return Subject(kind="norm", build=lambda c: Norm(c.d_model, stats), forward=lambda m, x: m(x),
                   declares={"norm": "layer", "norm_bias": True})


right, wrong = subject(two_pass), subject(moments)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    for shift, clash in ((0.0, False), (3000.0, True)):
        x = torch.randn(2, 3, 16) + shift
        want = F.layer_norm(x.double(), (16,)).float()
        dr, dw = ((Norm(16, s)(x) - want).abs().max().item() for s in (two_pass, moments))
        print(shift, dr, dw)
        assert dr < 2e-3 and (dw > 2e-2) == clash
