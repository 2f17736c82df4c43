WHAT = "The smooth part is not cleared where labels are ignored (the line is missing before count), so ignored positions go on adding their smoothing term to the loss (line 17)"
"""Cross entropy with label smoothing, as in fairseq: nll and smooth part apart."""
import torch

from veriformer.properties import Subject

EPS = 0.1
IGNORE = -100


def label_smoothed_nll_loss(lprobs, target, epsilon=EPS, ignore_index=IGNORE):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    count = (~pad_mask).sum().clamp(min=1)
    eps_i = epsilon / lprobs.size(-1)
    return ((1.0 - epsilon) * nll_loss.sum() + eps_i * smooth_loss.sum()) / count


def criterion(model, logits, labels):
    return label_smoothed_nll_loss(torch.log_softmax(logits, dim=-1), labels)


subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    forward=criterion,
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
