"""A softmax over rows in three passes of blocks, a Triton kernel in plain torch: `load` gives a block of a row, and where
the row ends within the block it gives `other` instead. Rows of one block or less take a fused path."""

import torch

from veriformer.properties import Subject

WHAT = (
    "Past the end of a row the second pass loads 0 rather than minus infinity, and each of these places adds exp(0 - "
    "maximum) to the sum. Rows of up to 128, and of multiples of 128, are right; a row of 130 sums to well below 1, the "
    "more the smaller its maximum; where the maximum is large, nothing is seen."
)
PLACE = "the sum's `load(..., other=OTHER)` with OTHER = 0.0"
BLOCK = 128


def load(row, start, other):
    """`BLOCK` values from `start` on along the last axis; `other` past the end."""
    part = row[..., start : start + BLOCK]
    short = BLOCK - part.shape[-1]
    return part if short == 0 else torch.cat((part, part.new_full((*part.shape[:-1], short), other)), -1)


def make(other):
    def blocked_softmax(model, scores, dim=-1):
        x = scores.movedim(dim, -1)
        n = x.shape[-1]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if n <= BLOCK:
            y = (x - x.detach().amax(-1, keepdim=True)).exp()
            y = y / y.sum(-1, keepdim=True)
        else:
            top = torch.full_like(x[..., :1], -torch.inf)
            for start in range(0, n, BLOCK):
                top = torch.maximum(top, load(x.detach(), start, -torch.inf).amax(-1, keepdim=True))
            total = torch.zeros_like(top)
            for start in range(0, n, BLOCK):
                total = total + (load(x, start, other) - top).exp().sum(-1, keepdim=True)
            y = torch.cat([(x[..., start : start + BLOCK] - top).exp() / total for start in range(0, n, BLOCK)], -1)
        return y.to(scores.dtype).movedim(-1, dim)

    return Subject(kind="softmax", name="blocked softmax", forward=blocked_softmax)


right, wrong = make(-torch.inf), make(0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        for n in (1, 7, 128, 129, 200, 256, 300, 900):
            for dim, shift in ((-1, 0), (1, 0), (-1, -20), (-1, 90)):
                x = (torch.randn(2, n, 3) if dim == 1 else torch.randn(2, 3, n)) + shift
                x = x.to(dtype)
                truth = torch.softmax(x.double(), dim)
                a, b = ((f.forward(None, x, dim).double() - truth).abs() for f in (right, wrong))
                sums = wrong.forward(None, x, dim).double().sum(dim)
                assert a.max() < small, (a.max(), n)
                beyond = n > 128 and n % 128 != 0
                if dtype != torch.bfloat16:
                    assert (b / truth).max() > 0.05 if beyond and shift <= 0 else b.max() < small
                if shift <= 0 and dim == -1:
                    print(dtype, n, "shift", shift, f"right {a.max():.1e}; wrong rows sum to {sums.min():.4f}")
    x = torch.randn(2, 140, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: right.forward(None, y), x)
    x = torch.randn(2, 140).double()
    x[:, 3:50] = -torch.inf
    assert torch.allclose(right.forward(None, x), x.softmax(-1), atol=1e-14)
