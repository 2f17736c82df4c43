"""Softmax in two stages, as on hardware that holds a block of a row at a time: every block gives its maximum and its sum,
the blocks are put together, and the row is divided. Rows may hold -inf (masked scores)."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = "A block of 16 scores that are all -inf subtracts -inf from -inf: its NaN spoils the whole row."
CAUSE = (
    "The first stage shifts each block by the block's own maximum without guarding a block that is masked throughout: "
    "there the maximum is -inf, exp(-inf - -inf) is NaN, and the merged denominator of a row with other, visible "
    "entries becomes NaN too."
)

BLOCK = 16


class BlockSoftmax(nn.Module):
    def __init__(self, block: int = BLOCK):
        super().__init__()
        self.block = block

    def origin(self, top):
        """What the exponents of a block are counted from."""
        return torch.where(top == float("-inf"), torch.zeros_like(top), top)

    def stage_one(self, blocks):
        """Blocks [..., N, block] -> the maximum and the sum of each [..., N]."""
        top = blocks.detach().amax(-1)
        total = (blocks - self.origin(top)[..., None]).exp().sum(-1)
        return top, total

    def stage_two(self, top, total):
        """Maxima and sums of blocks [..., N] -> those of the row [..., 1]."""
        best = top.amax(-1, keepdim=True)
        best = torch.where(best == float("-inf"), torch.zeros_like(best), best)
        return best, (total * (top - best).exp()).sum(-1, keepdim=True)

    def forward(self, scores, dim: int = -1):
        row = scores.movedim(dim, -1)
        work = row.to(torch.promote_types(row.dtype, torch.float32))
        size = work.shape[-1]
        padded = F.pad(work, (0, -size % self.block), value=float("-inf"))
        blocks = padded.unflatten(-1, (-1, self.block))
        best, total = self.stage_two(*self.stage_one(blocks))
        total = torch.where(total == 0, torch.ones_like(total), total)  # a row without anything visible: zeros
        return ((work - best).exp() / total).to(scores.dtype).movedim(-1, dim)


class UnguardedBlockSoftmax(BlockSoftmax):
    def origin(self, top):
        """What the exponents of a block are counted from."""
        return top


right = Subject(
    kind="softmax",
    name="block softmax",
    build=lambda c: BlockSoftmax(),
    forward=lambda m, scores, dim=-1: m(scores, dim),
)
wrong = Subject(
    kind="softmax",
    name="block softmax, unguarded",
    build=lambda c: UnguardedBlockSoftmax(),
    forward=lambda m, scores, dim=-1: m(scores, dim),
)
