WHAT = "The smoothing term is not masked: ignored positions add to the sum that is divided by the number of real tokens (behind line 15)."
# Label smoothed cross entropy for seq2seq models, in the manner of fairseq's criterion.
import torch

from veriformer.properties import Subject

EPSILON, IGNORE = 0.1, -100


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    ntokens = pad_mask.logical_not().sum().clamp(min=1)
    loss = (1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()
    return loss / ntokens


def criterion(model, logits, labels):
    lprobs = torch.log_softmax(logits, dim=-1)
    return label_smoothed_nll_loss(lprobs, labels, EPSILON, IGNORE)


subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    forward=criterion,
    declares={"label_smoothing": EPSILON, "ignore_index": IGNORE, "empty_loss": "zero"},
)
