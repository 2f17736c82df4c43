"""A softmax by hand."""

import torch

from veriformer.properties import Subject

WHAT = "the maximum of the whole tensor is subtracted, so that rows far below it underflow to 0/0"
CAUSE = (
    "The maximum is taken over the whole tensor instead of along the axis, so that rows whose scores lie far below "
    "another row's underflow to 0/0 (NaN) and rows influence one another."
)


def softmax(model, scores, dim=-1):
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    e = torch.exp(wide - wide.amax(dim, keepdim=True).detach())
    return (e / e.sum(dim, keepdim=True)).to(scores.dtype)


def stable_softmax(model, scores, dim=-1):
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    e = torch.exp(wide - wide.max().detach())
    return (e / e.sum(dim, keepdim=True)).to(scores.dtype)


def subject(function):
    return Subject(kind="softmax", name="softmax by hand", forward=function)


right = subject(softmax)
wrong = subject(stable_softmax)
