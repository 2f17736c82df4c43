"""Loss of a causal language model, with token-exact gradient accumulation (Trainer style)."""

import torch
import torch.nn.functional as F

from veriformer.properties import Subject


class CausalLMLoss:
    """`num_items` is the number of predicted tokens over all micro-batches of one optimizer step."""

    def __init__(self, ignore_index=-100):
        self.ignore_index = ignore_index

    def __call__(self, logits, labels, num_items=None):
        shift_logits = logits[:, :-1, :].reshape(-1, logits.size(-1))
        shift_labels = labels[:, 1:].reshape(-1)
        total = F.cross_entropy(shift_logits, shift_labels, ignore_index=self.ignore_index, reduction="sum")
        if num_items is None:
            num_items = int((shift_labels != self.ignore_index).sum())
        return total / max(num_items, 1)

    def accumulate(self, micro_batches):
        counted = 0
        for _, labels in micro_batches:
            counted += int((labels[:, 1:] != self.ignore_index).sum())
        loss = 0.0
        for logits, labels in micro_batches:
            loss = loss + self(logits, labels, num_items=counted)
        return loss


subject = Subject(
    kind="loss",
    name="causal LM loss",
    build=lambda c: CausalLMLoss(),
    forward=lambda model, logits, labels: model(logits, labels),
    accumulate=lambda model, pairs: model.accumulate(pairs),
    declares={"ignore_index": -100, "shifts_labels": True, "empty_loss": "zero"},
)
