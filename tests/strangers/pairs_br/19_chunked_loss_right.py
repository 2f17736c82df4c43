"""Cross-entropy in chunks of tokens: for long contexts the softmax over the vocabulary never exists as a whole."""
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

CHUNK = 4
IGNORE = -100


def chunked_cross_entropy(logits, labels, chunk=CHUNK):
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses, counts = [], []
    for piece, target in zip(logits.split(chunk), labels.split(chunk)):
        losses.append(F.cross_entropy(piece, target, ignore_index=IGNORE, reduction="sum"))
        counts.append((target != IGNORE).sum())
    losses, counts = torch.stack(losses), torch.stack(counts)
    return losses.sum() / counts.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="chunked cross-entropy",
    forward=lambda model, logits, labels: chunked_cross_entropy(logits, labels),
    declares={"ignore_index": IGNORE, "empty_loss": "zero"},
)
