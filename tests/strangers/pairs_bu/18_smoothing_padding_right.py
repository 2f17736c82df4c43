import torch
from torch.nn import functional as F

from veriformer.properties import Subject

EPS, IGNORE = 0.1, -100


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)
    count = (~pad_mask).sum().clamp(min=1)
    return ((1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()) / count


def criterion(model, logits, labels):
    lprobs = F.log_softmax(logits.flatten(0, -2), dim=-1)
    return label_smoothed_nll_loss(lprobs, labels.flatten(), EPS, IGNORE)


subject = Subject(
    kind="loss",
    forward=criterion,
    declares={"label_smoothing": EPS, "ignore_index": IGNORE, "empty_loss": "zero"},
)
