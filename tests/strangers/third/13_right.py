import math
import torch


def attention(q, k, v, mask=None):
    """Scaled dot product attention.

    q: (..., Tq, d)   k: (..., Tk, d)   v: (..., Tk, dv)
    mask: broadcastable to (..., Tq, Tk), nonzero where attention is allowed
    """
    d = q.shape[-1]
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v)
