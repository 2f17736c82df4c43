"""Softmax over long rows by chunks: statistics of each chunk first, then one rescaling (the decomposition of split-K decoding)."""
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

CHUNK = 4


def chunked_softmax(scores, dim=-1):
    dtype = scores.dtype
    x = scores.movedim(dim, -1)
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    size = x.shape[-1]
    ragged = -size % CHUNK
    if ragged:
        x = F.pad(x, (0, ragged), value=float("-inf"))
    x = x.unflatten(-1, (-1, CHUNK))
    local_max = x.amax(dim=-1, keepdim=True)
    shift = torch.where(local_max == float("-inf"), torch.zeros_like(local_max), local_max).detach()
    exps = torch.exp(x - shift)
    row_max = shift.amax(dim=-2, keepdim=True)
    rescale = torch.exp(shift - row_max)
    numerator = exps * rescale
    denominator = numerator.sum(dim=(-2, -1), keepdim=True)
    out = (numerator / denominator).flatten(-2)[..., :size]
    return out.to(dtype).movedim(-1, dim)


subject = Subject(
    kind="softmax",
    name="chunked softmax",
    forward=lambda model, scores, dim=-1: chunked_softmax(scores, dim),
    declares={"empty_row": "nan"},
)
