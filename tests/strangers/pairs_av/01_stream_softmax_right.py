"""Softmax in one streaming pass over blocks of the last axis, as a fused kernel has it."""
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

BLOCK = 4


def stream_softmax(scores, dim=-1):
    x = scores.movedim(dim, -1)
    size = x.shape[-1]
    tail = -size % BLOCK
    blocks = F.pad(x, (0, tail), value=float("-inf")).unflatten(-1, (-1, BLOCK))

    best = torch.full_like(x[..., :1], float("-inf"))
    total = torch.zeros_like(best)
    for i in range(blocks.shape[-2]):
        block = blocks[..., i, :]
        new = torch.maximum(best, block.detach().amax(-1, keepdim=True))
        shift = new.masked_fill(new == float("-inf"), 0.0)
        total = total * torch.exp(best - shift) + torch.exp(block - shift).sum(-1, keepdim=True)
        best = new
    best = best.masked_fill(best == float("-inf"), 0.0).detach()
    return (torch.exp(x - best) / total).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="stream softmax",
    forward=lambda model, scores, dim=-1: stream_softmax(scores, dim),
)
