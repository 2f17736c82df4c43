"""Label-smoothed cross-entropy, after fairseq's criterion."""

import torch

from veriformer.properties import Subject

WHAT = "The smoothing term is averaged over ignored positions too: only the likelihood's term is masked."
CAUSE = (
    "Ignored positions enter the loss through the smoothing term (its sum over the vocabulary is not masked there), and "
    "get a gradient."
)
EPS, IGNORE = 0.1, -100


def make(hide):
    def label_smoothed_nll_loss(model, logits, labels):
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        lprobs = torch.log_softmax(logits.to(wide), dim=-1).flatten(0, -2)
        target = labels.reshape(-1, 1)
        pad = target.eq(IGNORE)
        nll = -lprobs.gather(-1, target.masked_fill(pad, 0)).masked_fill(pad, 0.0)
        smooth = hide((-lprobs / lprobs.shape[-1]).sum(-1, keepdim=True), pad)
        count = (~pad).sum().clamp(min=1)
        return (((1.0 - EPS) * nll + EPS * smooth) / count).sum()

    return label_smoothed_nll_loss


def subject(hide):
    return Subject(
        kind="loss",
        name="label-smoothed loss",
        forward=make(hide),
        declares={"label_smoothing": EPS, "ignore_index": IGNORE, "shifts_labels": False, "empty_loss": "zero"},
    )


right = subject(lambda smooth, pad: smooth.masked_fill(pad, 0.0))
wrong = subject(lambda smooth, pad: smooth)
