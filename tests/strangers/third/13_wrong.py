import math
import torch


def attention(q, k, v, mask=None):
    """Scaled dot product attention.

    q: (..., Tq, d)   k: (..., Tk, d)   v: (..., Tk, dv)
    mask: broadcastable to (..., Tq, Tk), nonzero where attention is allowed
    """
    d = q.shape[-1]
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(mask == 0, 0.0)
    return torch.matmul(weights, v)
