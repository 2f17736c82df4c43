# The loss of a causal-LM trainer: labels come unshifted, and the trainer counts the items of all micro-batches
# before it goes through them, so that gradient accumulation gives what one big batch would.
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CausalLMLoss(nn.Module):
    def __init__(self, ignore_index: int = -100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits, labels, num_items_in_batch=None):
        vocab_size = logits.size(-1)
        shift_logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        shift_labels = labels[..., 1:].contiguous().view(-1)
        reduction = "sum" if num_items_in_batch is not None else "mean"
        loss = F.cross_entropy(shift_logits, shift_labels, ignore_index=self.ignore_index, reduction=reduction)
        if reduction == "sum":
            loss = loss / num_items_in_batch
        return loss


class Trainer:
    def __init__(self, loss_fn):
        self.loss_fn = loss_fn

    def get_num_items(self, batch_samples):
        return sum((labels[:, 1:] != self.loss_fn.ignore_index).sum() for _, labels in batch_samples)

    def training_step(self, batch_samples):
        batch_samples = list(batch_samples)
        num_items_in_batch = self.get_num_items(batch_samples)
        total = 0.0
        for logits, labels in batch_samples:
            total = total + self.loss_fn(logits, labels, num_items_in_batch=num_items_in_batch)
        return total


subject = Subject(
    kind="loss",
    name="causal LM loss of a trainer",
    build=lambda c: CausalLMLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    accumulate=lambda m, pairs: Trainer(m).training_step(pairs),
    declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "nan", "min_length": 2},
)
