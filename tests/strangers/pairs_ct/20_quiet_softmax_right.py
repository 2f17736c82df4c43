"""Softmax that may choose nothing, exp(x) / (1 + sum exp(x)), for scores against a retrieval pool."""
import torch

from veriformer.properties import Subject


def softmax_one(scores, dim=-1):
    # the silent candidate has score 0; everything is shifted by the largest of all
    top = scores.detach().amax(dim=dim, keepdim=True).clamp(min=0)
    e = torch.exp(scores - top)
    nothing = torch.exp(-top)
    return e / (nothing + e.sum(dim=dim, keepdim=True))


subject = Subject(
    kind="softmax",
    name="softmax one",
    build=lambda c: torch.nn.Identity(),
    forward=lambda m, scores, dim=-1: softmax_one(scores, dim),
    declares={"sink": True},
)
