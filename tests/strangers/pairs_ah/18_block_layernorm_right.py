"""LayerNorm ported from a Triton kernel: the row is read in blocks, lanes behind its end read 0."""
import torch
from torch import nn

from veriformer.properties import Subject

BLOCK_SIZE = 16


def load(rows, off, n):
    """One block of lanes; those at n and behind give 0 (`tl.load(..., mask=cols < N, other=0.)`)."""
    block = rows[:, off:off + BLOCK_SIZE]
    return nn.functional.pad(block, (0, BLOCK_SIZE - block.shape[1]))


class BlockLayerNorm(nn.Module):
    def __init__(self, n, eps=1e-5):
        super().__init__()
        self.n, self.eps = n, eps
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        rows = x.reshape(-1, self.n)
        zero = rows.new_zeros(rows.shape[0], BLOCK_SIZE)
        _mean = zero
        for off in range(0, self.n, BLOCK_SIZE):
            _mean = _mean + load(rows, off, self.n)
        mean = _mean.sum(1, keepdim=True) / self.n
        _var = zero
        for off in range(0, self.n, BLOCK_SIZE):
            cols = off + torch.arange(BLOCK_SIZE, device=x.device)
            a = torch.where(cols < self.n, load(rows, off, self.n) - mean, zero)
            _var = _var + a * a
        var = _var.sum(1, keepdim=True) / self.n
        out = (rows - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias
        return out.view_as(x)


subject = Subject(
    kind="norm",
    name="LayerNorm in blocks",
    build=lambda c: BlockLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)
