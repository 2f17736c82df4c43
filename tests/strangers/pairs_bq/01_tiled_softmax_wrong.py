WHAT = "TiledSoftmax.backward takes the row's inner product sum(y * dy) inside the loop, over one tile of columns alone, so that for rows longer than a tile the gradient is that of several separate softmaxes (line 38)."
"""Softmax in tiles of columns: one pass for (max, sum), one for the output, a backward of its own."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

TILE = 4


class TiledSoftmax(Function):
    @staticmethod
    def forward(ctx, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        best = wide.new_full((*wide.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(best)
        shift = torch.zeros_like(best)
        for tile in wide.split(TILE, dim=-1):
            new = torch.maximum(best, tile.amax(-1, keepdim=True))
            shift = new.masked_fill(new == -torch.inf, 0.0)
            total = total * (best - shift).exp() + (tile - shift).exp().sum(-1, keepdim=True)
            best = new
        y = torch.empty_like(wide)
        for source, target in zip(wide.split(TILE, dim=-1), y.split(TILE, dim=-1)):
            target.copy_((source - shift).exp() / total)
        ctx.save_for_backward(y)
        ctx.dtype = x.dtype
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dy = dy.to(y.dtype)
        dx = torch.empty_like(y)
        for a, b, target in zip(y.split(TILE, dim=-1), dy.split(TILE, dim=-1), dx.split(TILE, dim=-1)):
            inner = (a * b).sum(-1, keepdim=True)
            target.copy_(a * (b - inner))
        return dx.to(ctx.dtype)


def softmax(model, scores, dim=-1):
    return TiledSoftmax.apply(scores.movedim(dim, -1)).movedim(-1, dim)


subject = Subject(kind="softmax", name="tiled softmax", forward=softmax, declares={"once_differentiable": True})
