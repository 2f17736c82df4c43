WHAT = 'The smoothing term is not set to 0 where the label is ignored (only nll_loss is masked), so that padded positions are trained towards the uniform distribution.'
import torch.nn.functional as F

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    ntokens = (~pad_mask).sum().clamp(min=1)
    return ((1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()) / ntokens


def criterion(model, logits, labels):
    lprobs = F.log_softmax(logits, dim=-1)
    return label_smoothed_nll_loss(lprobs.flatten(0, 1), labels.flatten(), epsilon=0.1, ignore_index=-100)


subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    forward=criterion,
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
