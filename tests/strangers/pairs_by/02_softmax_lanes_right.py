# Softmax in vectors of eight lanes: the rows are padded to whole vectors, as the kernel of the device wants them.
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

LANES = 8


def softmax(model, scores, dim=-1):
    rows = scores.movedim(dim, -1)
    n = rows.shape[-1]
    tail = -n % LANES
    peak = rows.amax(-1, keepdim=True)
    shifted = F.pad(rows - peak, (0, tail), value=float("-inf"))
    vectors = torch.exp(shifted).unflatten(-1, (-1, LANES))
    # lanes first, then across: the order in which the device reduces
    total = vectors.sum(-2).sum(-1, keepdim=True)
    out = vectors.flatten(-2)[..., :n] / total
    return out.movedim(-1, dim)


subject = Subject(kind="softmax", name="softmax by lanes", forward=softmax)
