"""Softmax of masked scores, tile by tile, as the fused mask + softmax kernel does it."""
import math
from typing import NamedTuple

import torch
from torch import Tensor
from veriformer.properties import Subject

WHAT = (
    "If the first 128 scores of a row are all -inf (left padding longer than a tile), the running maximum is still -inf when it is "
    "rescaled: exp(-inf - -inf) is NaN and the whole row, which has finite scores further on, becomes NaN."
)
PLACE = "Running.absorb: the rescaling factor of the denominator is not guarded while the maximum is -inf"

TILE = 128


class Running(NamedTuple):
    top: Tensor
    total: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> "Running":
        column = like[..., :1].detach()
        return cls(torch.full_like(column, -math.inf), torch.zeros_like(column))

    def absorb(self, tile: Tensor, guard: bool) -> "Running":
        top = torch.maximum(self.top, tile.detach().amax(-1, keepdim=True))
        anchor = finite(top)
        total = self.total * torch.exp(self.top - (anchor if guard else top))
        return Running(top, total + torch.exp(tile - anchor).sum(-1, keepdim=True))


def finite(top: Tensor) -> Tensor:
    return torch.where(torch.isneginf(top), torch.zeros_like(top), top)


class FusedSoftmax(torch.nn.Module):
    def __init__(self, guard: bool = True):
        super().__init__()
        self.guard = guard

    def forward(self, scores: Tensor, dim: int = -1) -> Tensor:
        rows = scores.transpose(dim, -1)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        starts = range(0, wide.shape[-1], TILE)
        state = Running.empty(wide)
        for start in starts:
            state = state.absorb(wide[..., start : start + TILE], self.guard)
        anchor = finite(state.top)
        out = [torch.exp(wide[..., start : start + TILE] - anchor) / state.total for start in starts]
        return torch.cat(out, -1).to(scores.dtype).transpose(dim, -1)


facts = {"empty_row": "nan", "half_precision": True}
right = Subject(kind="softmax", name="fused", build=lambda c: FusedSoftmax(), declares=facts)
wrong = Subject(kind="softmax", name="fused-unguarded", build=lambda c: FusedSoftmax(guard=False), declares=facts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(13)
    good, bad = FusedSoftmax(), FusedSoftmax(guard=False)

    def agrees(module, x, dim=-1):
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        y, ref = module(a, dim), torch.softmax(b, dim)
        if not torch.allclose(y.double(), ref, atol=1e-6, equal_nan=True):
            return False
        g = torch.randn_like(y)
        (da,), (db,) = torch.autograd.grad(y, a, g), torch.autograd.grad(ref, b, g.double())
        return torch.allclose(da.double(), db, atol=1e-5, equal_nan=True)

    for shape, dim in [((4, 6), -1), ((2, 3, 128), -1), ((300, 4), 0), ((2, 3, 500), -1), ((2, 400, 3), -2)]:
        x = torch.randn(shape) * 4
        assert agrees(good, x, dim) and agrees(bad, x, dim)
        x = x.masked_fill(torch.rand(shape) < 0.3, -math.inf)
        assert agrees(good, x, dim) and agrees(bad, x, dim)
    for n, gap in [(10, 9), (128, 127), (300, 100), (500, 127)]:
        x = torch.randn(3, n)
        x[1, :gap] = -math.inf
        x[0, n - gap :] = -math.inf
        assert agrees(good, x) and agrees(bad, x)
    for n, gap in [(129, 128), (300, 200), (1000, 999)]:
        x = torch.randn(3, n)
        x[1, :gap] = -math.inf
        assert agrees(good, x)
        assert bad(x)[1].isnan().all() and not bad(x)[0].isnan().any()
    print("ok")
