WHAT = "after the maximum is subtracted the sink's own term must be exp(-m), but 1 stays in the denominator, so the result depends on the shift and is no longer exp(x) / (1 + sum exp(x)) (line 12: return e / (1 + e.sum(dim=dim, keepdim=True)))"
import torch
import torch.nn as nn

from veriformer.properties import Subject


def softmax_one(x, dim=-1):
    """exp(x) / (1 + sum(exp(x))): a sink whose logit is 0."""
    m = x.amax(dim=dim, keepdim=True).clamp(min=0)
    e = torch.exp(x - m)
    return e / (1 + e.sum(dim=dim, keepdim=True))


subject = Subject(kind="softmax", forward=lambda m, scores, dim=-1: softmax_one(scores, dim), declares={"sink": True})
