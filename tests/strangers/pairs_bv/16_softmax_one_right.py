import torch
import torch.nn as nn

from veriformer.properties import Subject


def softmax_one(x, dim=-1):
    """exp(x) / (1 + sum(exp(x))): a sink whose logit is 0."""
    m = x.amax(dim=dim, keepdim=True).clamp(min=0)
    e = torch.exp(x - m)
    return e / (torch.exp(-m) + e.sum(dim=dim, keepdim=True))


subject = Subject(kind="softmax", forward=lambda m, scores, dim=-1: softmax_one(scores, dim), declares={"sink": True})
