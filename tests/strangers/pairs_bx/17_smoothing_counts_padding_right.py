import torch

from veriformer.properties import Subject

PAD, EPSILON = 1, 0.1


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    nll = -lprobs.gather(dim=-1, index=target)
    smooth = -lprobs.sum(dim=-1, keepdim=True)
    pad = target.eq(ignore_index)
    nll = nll.masked_fill(pad, 0.0)
    smooth = smooth.masked_fill(pad, 0.0)
    count = pad.logical_not().sum()
    eps_i = epsilon / lprobs.size(-1)
    return ((1.0 - epsilon) * nll.sum() + eps_i * smooth.sum()) / count


def criterion(model, logits, labels):
    lprobs = torch.log_softmax(logits, dim=-1)
    return label_smoothed_nll_loss(lprobs.flatten(0, 1), labels.flatten(), EPSILON, PAD)


subject = Subject(
    kind="loss",
    name="label-smoothed cross-entropy of a translator",
    forward=criterion,
    declares={"ignore_index": PAD, "label_smoothing": EPSILON, "empty_loss": "nan"},
)
