WHAT = "The smoothing term is never masked (line 15, summed below as it is): ignored positions add their uniform cross entropy to the loss and get gradients, while the divisor leaves them out."
"""fairseq's label-smoothed cross entropy, with the mean over the tokens that count."""

import torch

from veriformer.properties import Subject

EPSILON, IGNORE = 0.1, -100


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    eps_i = epsilon / lprobs.size(-1)
    loss = (1.0 - epsilon) * nll_loss.sum() + eps_i * smooth_loss.sum()
    return loss / (~pad_mask).sum().clamp(min=1)


def forward(model, logits, labels):
    lprobs = torch.log_softmax(logits, dim=-1).flatten(0, 1)
    return label_smoothed_nll_loss(lprobs, labels.flatten(), EPSILON, IGNORE)


subject = Subject(
    kind="loss",
    name="label-smoothed cross entropy",
    forward=forward,
    declares={"label_smoothing": EPSILON, "ignore_index": IGNORE, "empty_loss": "zero"},
)
