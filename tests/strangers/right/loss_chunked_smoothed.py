"""Cross-entropy with label smoothing 0.1 in chunks of seven tokens that are recomputed in the backward pass; -100 is ignored.

Unusual: the sum over all tokens is divided by their number once at the end, so chunks of unequal content weigh right, and several
batches are accumulated in the same way (`accumulate`: all sums over all counts). Nothing to predict gives 0, with a gradient of 0.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject

EPS = 0.1
IGNORE = -100
CHUNK = 7


def chunk_sum(logits, labels):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = wide - wide.logsumexp(dim=-1, keepdim=True)
    counted = labels != IGNORE
    hit = log_p.gather(1, labels.where(counted, 0).unsqueeze(1)).squeeze(1)
    loss = -(1 - EPS) * hit - EPS * log_p.mean(dim=-1)
    return loss.masked_fill(~counted, 0.0).sum()


class ChunkedLoss(nn.Module):
    def total(self, logits, labels):
        logits, labels = logits.flatten(0, -2), labels.flatten()
        total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        for piece, target in zip(logits.split(CHUNK), labels.split(CHUNK)):
            if torch.is_grad_enabled() and piece.requires_grad:
                total = total + checkpoint(chunk_sum, piece, target, use_reentrant=False)
            else:
                total = total + chunk_sum(piece, target)
        return total, (labels != IGNORE).sum()

    def forward(self, logits, labels):
        return self.mean([(logits, labels)])

    def mean(self, pairs):
        totals, counts = zip(*(self.total(logits, labels) for logits, labels in pairs))
        return sum(totals) / sum(counts).clamp(min=1)


COMMON = dict(
    kind="loss",
    build=lambda c: ChunkedLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    accumulate=lambda m, pairs: m.mean(pairs),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON, declares={"ignore_index": IGNORE, "label_smoothing": EPS, "shifts_labels": False, "empty_loss": "zero"}
)
