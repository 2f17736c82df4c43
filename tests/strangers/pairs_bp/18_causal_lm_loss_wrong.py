WHAT = "The number of items is counted on the labels before the shift (line 15), the first label of each row, which is never predicted, among them, so the mean is too small by about (T - 1) / T."
"""ForCausalLMLoss without a reduction of torch's: the sum is divided by the number of items, so that micro-batches can share one."""
import torch

from veriformer.properties import Subject

IGNORE = -100


def causal_lm_loss(logits, labels, num_items_in_batch=None):
    logits = logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    keep = targets != IGNORE
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORE).sum()
    log_z = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, targets.masked_fill(~keep, 0)[:, None])[:, 0]
    nll = (log_z - picked).masked_fill(~keep, 0.0)
    return nll.sum() / num_items_in_batch.clamp(min=1)


subject = Subject(
    kind="loss",
    name="causal LM loss",
    forward=lambda model, logits, labels: causal_lm_loss(logits, labels),
    declares={"shifts_labels": True, "ignore_index": IGNORE, "empty_loss": "zero"},
)
