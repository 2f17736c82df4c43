"""softmax_1: exp(x_i) / (1 + sum_j exp(x_j)), so that a head may attend to nothing. Stable for any scores."""

import torch
from torch import Tensor

from veriformer.properties import Subject


def softmax_one(x: Tensor, dim: int = -1) -> Tensor:
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    shift = work.detach().amax(dim=dim, keepdim=True).clamp(min=0)
    e = torch.exp(work - shift)
    return (e / (e.sum(dim=dim, keepdim=True) + 1.0)).to(x.dtype)


subject = Subject(
    kind="softmax",
    name="softmax_one",
    forward=lambda model, scores, dim=-1: softmax_one(scores, dim),
    declares={"sink": True, "empty_row": "zeros", "half_precision": True},
)
