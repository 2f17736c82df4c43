"""A LayerNorm that reads wide rows in chunks of 64 and merges mean and squared deviations of the chunks (Chan, Golub and
LeVeque), as a CUDA kernel's warps do it (Apex's `cuWelfordOnlineSum`)."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The merge counts chunks, not elements: the last, shorter chunk weighs as much as a full one in the mean and in the "
    "squared deviations. Widths of up to 64 and multiples of 64 are right; at a width of 100 the rows come out with a "
    "mean and a variance that are not 0 and 1."
)
PLACE = "Wrong.count: BLOCK for every chunk"
BLOCK = 64


class ChunkedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def count(self, chunk):
        return chunk.shape[-1]

    def moments(self, x):
        """Mean and biased variance of the last axis."""
        n, mean, m2 = 0, x.new_zeros(()), x.new_zeros(())
        for chunk in x.split(BLOCK, -1):
            own = chunk.mean(-1, keepdim=True)
            squares = (chunk - own).square().sum(-1, keepdim=True)
            k = self.count(chunk)
            delta = own - mean
            mean = mean + delta * (k / (n + k))
            m2 = m2 + squares + delta.square() * (n * k / (n + k))
            n += k
        return mean, m2 / x.shape[-1]

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance = self.moments(wide)
        y = (wide - mean) * torch.rsqrt(variance + self.eps)
        return (y * self.gamma.to(wide.dtype) + self.beta.to(wide.dtype)).to(x.dtype)


class Wrong(ChunkedLayerNorm):
    def count(self, chunk):
        return BLOCK


def make(cls):
    return Subject(
        kind="norm",
        name="chunked LayerNorm",
        build=lambda c: cls(c.d_model),
        forward=lambda norm, x: norm(x),
        declares={"norm": "layer", "norm_bias": True},
    )


right, wrong = make(ChunkedLayerNorm), make(Wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for width in (3, 8, 64, 65, 72, 100, 128, 200, 1000):
            c = DrawnConfig(d_model=width)
            good, bad = right.build(c).to(dtype), wrong.build(c).to(dtype)
            for shift in (0, 3):
                x = (torch.randn(4, 5, width) + shift + torch.linspace(0, 2, width)).to(dtype)
                d = x.double()
                truth = (d - d.mean(-1, keepdim=True)) / (d.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
                a, b = ((m(x) - truth).abs().max().item() for m in (good, bad))
                print(dtype, "width", width, "shift", shift, f"right {a:.1e} wrong {b:.1e}")
                beyond = width > 64 and width % 64
                assert a < small and (b > 0.05 if beyond else b < small)
