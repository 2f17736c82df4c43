"""ggml_vec_soft_max in chunks of eight lanes: the maximum, the exponentials and their sum, the division."""
import torch

from veriformer.properties import Subject

LANES = 8


def vec_max(row, start):
    top = torch.full_like(row[..., :1], start)
    for lane in row.split(LANES, dim=-1):
        top = torch.maximum(top, lane.amax(-1, keepdim=True))
    return top


def vec_soft_max(model, scores, dim=-1):
    row = scores.movedim(dim, -1)
    top = vec_max(row, torch.finfo(row.dtype).tiny)
    e = torch.exp(row - top)
    total = torch.zeros_like(top)
    for lane in e.split(LANES, dim=-1):
        total = total + lane.sum(-1, keepdim=True)
    return (e / total).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="vec_soft_max",
    forward=vec_soft_max,
)
WHAT = "The running maximum begins at FLT_MIN, which is the smallest positive number and not the lowest one (line 18): rows of negative scores are not shifted by their maximum, and underflow to 0/0 from about -104 downwards in float32."
