# Cross-entropy over the vocabulary in chunks of tokens, so that the log-probabilities of all never exist at once.
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

IGNORE = -100
CHUNK = 4


def chunked_cross_entropy(logits, labels):
    logits = logits.reshape(-1, logits.size(-1))
    labels = labels.reshape(-1)
    total, count = logits.new_zeros(()), 0
    for chunk, target in zip(logits.split(CHUNK), labels.split(CHUNK)):
        loss = F.cross_entropy(chunk, target, ignore_index=IGNORE, reduction="sum")
        total = total + loss
        count = count + (target != IGNORE).sum()
    return total / torch.as_tensor(count, device=logits.device).clamp(min=1)


subject = Subject(
    kind="loss",
    name="chunked cross-entropy",
    forward=lambda model, logits, labels: chunked_cross_entropy(logits, labels),
    declares={"ignore_index": IGNORE, "empty_loss": "zero"},
)
