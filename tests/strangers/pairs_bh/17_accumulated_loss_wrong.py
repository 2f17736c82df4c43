WHAT = "num_items_in_batch counts the labels before the shift, so each row's first label, which is never predicted, counts in the denominator of the accumulated loss (line 23)."
"""Causal language model loss with num_items_in_batch, so that accumulated micro-batches weigh every token alike."""
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

IGNORE = -100


def causal_lm_loss(logits, labels, num_items_in_batch=None):
    """Labels are not shifted by the caller: t predicts t + 1."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORE).sum().clamp(min=1)
    return total / num_items_in_batch


def accumulated(pairs):
    """What a step with gradient accumulation minimises: the sum of its micro-batches' losses."""
    num_items = sum((labels != IGNORE).sum() for _, labels in pairs).clamp(min=1)
    loss = 0.0
    for logits, labels in pairs:
        loss = loss + causal_lm_loss(logits, labels, num_items_in_batch=num_items)
    return loss


subject = Subject(
    kind="loss",
    name="causal LM loss with accumulation",
    forward=lambda model, logits, labels: causal_lm_loss(logits, labels),
    accumulate=lambda model, pairs: accumulated(pairs),
    declares={"ignore_index": IGNORE, "shifts_labels": True, "empty_loss": "zero"},
)
