# The loss of a language model, as in a tutorial: logits of token t are held against token t + 1.

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = "The labels are shifted by one after batch and time have been flattened, so the last token of each sample is to predict the first of the next."
CAUSE = (
    "Flattening to [B*T, V] before the shift removes the border between samples: for B > 1 the last logits of sample b "
    "are compared with the first label of sample b + 1, B - 1 targets that do not exist (with one sample all is right)."
)

IGNORE = -100


def next_token_pairs(logits, labels):
    """The logits [N, V] and what each of them should have foretold [N]."""
    # drop the last prediction (nothing comes after it) ...
    logits = logits[:, :-1, :]
    # ... and the first label (nothing foretells it)
    labels = labels[:, 1:]
    return logits.flatten(0, 1), labels.flatten()


def next_token_pairs_flat(logits, labels):
    """The logits [N, V] and what each of them should have foretold [N]."""
    logits = logits.flatten(0, 1)
    labels = labels.flatten()
    # drop the last prediction (nothing comes after it) and the first label (nothing foretells it)
    return logits[:-1], labels[1:]


class LanguageModelLoss(nn.Module):
    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs

    def forward(self, logits, labels):
        logits, labels = self.pairs(logits, labels)
        # half precision: the log of the sum is taken in float32
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        # a batch without any target has loss 0, not nan
        return total / (labels != IGNORE).sum().clamp(min=1)


right = Subject(
    kind="loss",
    name="next-token loss",
    build=lambda c: LanguageModelLoss(next_token_pairs),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"shifts_labels": True, "empty_loss": "zero"},
)

wrong = Subject(
    kind="loss",
    name="next-token loss, flat",
    build=lambda c: LanguageModelLoss(next_token_pairs_flat),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"shifts_labels": True, "empty_loss": "zero"},
)
