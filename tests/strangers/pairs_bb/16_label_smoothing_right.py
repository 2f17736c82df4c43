"""Label-smoothed cross-entropy in the manner of fairseq."""
import torch

from veriformer.properties import Subject

EPSILON = 0.1
IGNORE = -100


def label_smoothed_nll_loss(logits, labels, epsilon=EPSILON, ignore_index=IGNORE):
    lprobs = torch.log_softmax(logits, dim=-1)
    pad_mask = labels.eq(ignore_index)
    target = labels.masked_fill(pad_mask, 0).unsqueeze(-1)
    nll = -lprobs.gather(dim=-1, index=target).squeeze(-1)
    smooth = -lprobs.mean(dim=-1)
    nll = nll.masked_fill(pad_mask, 0.0)
    smooth = smooth.masked_fill(pad_mask, 0.0)
    count = (~pad_mask).sum().clamp(min=1)
    nll = nll.sum() / count
    smooth = smooth.sum() / count
    return (1.0 - epsilon) * nll + epsilon * smooth


subject = Subject(
    kind="loss",
    name="label-smoothed cross-entropy",
    forward=lambda model, logits, labels: label_smoothed_nll_loss(logits, labels),
    declares={"label_smoothing": EPSILON, "ignore_index": IGNORE, "empty_loss": "zero", "shifts_labels": False},
)
