WHAT = 'The items of the accumulated step are counted on the unshifted labels (`labels.ne(IGNORE_INDEX).sum()` in get_num_items_in_batch), first tokens included that nothing predicts, so that the accumulated loss is too small beside that of the whole batch.'
"""ForCausalLMLoss and the trainer's gradient accumulation around it."""

import torch
import torch.nn.functional as F

from veriformer.properties import Subject

IGNORE_INDEX = -100


def fixed_cross_entropy(source, target, num_items_in_batch=None):
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(source, target, ignore_index=IGNORE_INDEX, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal_lm_loss(logits, labels, num_items_in_batch=None):
    """Labels come as the inputs are; token t predicts token t + 1, so the last has nothing to predict."""
    labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)
    shift_labels = labels[..., 1:].contiguous()
    return fixed_cross_entropy(logits.reshape(-1, logits.shape[-1]), shift_labels.view(-1), num_items_in_batch)


def get_num_items_in_batch(batch_labels):
    """How many labels are predicted in all the micro-batches of one optimizer step."""
    return torch.stack([labels.ne(IGNORE_INDEX).sum() for labels in batch_labels]).sum()


def accumulate(model, pairs):
    num_items = get_num_items_in_batch([labels for _, labels in pairs])
    total = 0.0
    for logits, labels in pairs:
        total = total + causal_lm_loss(logits, labels, num_items_in_batch=num_items)
    return total


subject = Subject(
    kind="loss",
    name="ForCausalLMLoss",
    forward=lambda model, logits, labels: causal_lm_loss(logits, labels),
    accumulate=accumulate,
    declares={"shifts_labels": True, "ignore_index": IGNORE_INDEX, "empty_loss": "nan"},
)
