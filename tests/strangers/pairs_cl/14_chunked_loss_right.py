"""Cross-entropy in chunks of rows, so that the float copy of the logits is never made whole."""

import torch

from veriformer.properties import Subject

ROWS, IGNORE = 8, -100


def chunked_loss(logits, labels):
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    counted = labels != IGNORE
    total = logits.new_zeros(())
    for z, y, c in zip(logits.split(ROWS), labels.split(ROWS), counted.split(ROWS)):
        best = z.amax(-1, keepdim=True).detach()
        lse = (z - best).exp().sum(-1).log() + best.squeeze(-1)
        nll = lse - z.gather(-1, y.masked_fill(~c, 0)[:, None]).squeeze(-1)
        mean = nll.masked_fill(~c, 0.0).sum() / c.sum().clamp(min=1)
        total = total + mean * c.sum() / counted.sum().clamp(min=1)
    return total


subject = Subject(
    kind="loss",
    name="chunked cross-entropy",
    forward=lambda model, logits, labels: chunked_loss(logits, labels),
    declares={"ignore_index": IGNORE, "empty_loss": "zero"},
)
