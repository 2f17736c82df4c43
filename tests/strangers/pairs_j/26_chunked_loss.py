"""Cross-entropy over chunks of tokens, so that not all of the log-softmax is held at once."""

import torch
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the mean of the chunks' means is taken, though chunks have unequal numbers of counted tokens"
CAUSE = (
    "The loss is the mean of the means of chunks of tokens instead of the sum over all counted tokens divided by their "
    "number, so that tokens in chunks with ignored labels, or in a shorter last chunk, weigh more."
)
CHUNK = 8


def pieces(logits, labels):
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    for part, wanted in zip(logits.split(CHUNK), labels.split(CHUNK)):
        wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
        yield F.cross_entropy(wide, wanted, ignore_index=-100, reduction="sum"), (wanted != -100).sum()


def chunked(model, logits, labels):
    total, count = 0.0, 0
    for loss, counted in pieces(logits, labels):
        total, count = total + loss, count + counted
    return total / count.clamp(min=1)


def chunked_mean(model, logits, labels):
    total, chunks = 0.0, 0
    for loss, counted in pieces(logits, labels):
        total, chunks = total + loss / counted.clamp(min=1), chunks + 1
    return total / chunks


def subject(function):
    return Subject(
        kind="loss",
        name="cross-entropy in chunks",
        forward=function,
        declares={"ignore_index": -100, "shifts_labels": False, "empty_loss": "zero"},
    )


right = subject(chunked)
wrong = subject(chunked_mean)
