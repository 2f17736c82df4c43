WHAT = "The tokens that an accumulated loss is divided by are counted over the unshifted labels, so each row's first label, which is never predicted, counts too, line 29."
"""Causal language modelling loss and its accumulation over micro-batches, as a trainer does it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

IGNORE = -100


class ForCausalLMLoss(nn.Module):
    """Moves the labels by one; with `num_items_in_batch` the sum over tokens is divided by it."""

    def forward(self, logits, labels, num_items_in_batch=None):
        logits = logits[..., :-1, :].contiguous()
        targets = labels[..., 1:].contiguous()
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=IGNORE, reduction=reduction
        )
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return loss


def get_num_items(micro_batches):
    return torch.stack([(labels != IGNORE).sum() for _, labels in micro_batches]).sum()


def accumulated(criterion, micro_batches):
    micro_batches = list(micro_batches)
    num_items = get_num_items(micro_batches)
    total = 0.0
    for logits, labels in micro_batches:
        total = total + criterion(logits, labels, num_items_in_batch=num_items)
    return total


subject = Subject(
    kind="loss",
    name="causal LM loss",
    build=lambda c: ForCausalLMLoss(),
    forward=lambda criterion, logits, labels: criterion(logits, labels),
    accumulate=accumulated,
    declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "nan"},
)
