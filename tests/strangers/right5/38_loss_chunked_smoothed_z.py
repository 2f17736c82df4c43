WHAT = "cross-entropy in chunks of 7 tokens that are computed again in the backward, with label smoothing 0.1, z-loss 1e-4, labels -100 left out, float32 inside, and 0 for a batch without labels"
import torch
from torch.utils.checkpoint import checkpoint

CHUNK, EPS, Z, IGNORE = 7, 0.1, 1e-4, -100


def chunk_sum(logits, labels):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = labels != IGNORE
    lse = x.logsumexp(-1)
    right = x.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    even = (x / x.shape[-1]).sum(-1)
    each = (1 - EPS) * (lse - right) + EPS * (lse - even) + Z * lse.square()
    return torch.where(counted, each, 0.0).sum()


def total(logits, labels):
    x, y = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return sum((checkpoint(chunk_sum, a, b, use_reentrant=False) for a, b in zip(x.split(CHUNK), y.split(CHUNK))),
               start=torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device))


def count(labels):
    return (labels != IGNORE).sum()


def loss(logits, labels):
    return total(logits, labels) / count(labels).clamp(min=1)


from veriformer.properties import Subject


def forward(model, logits, labels):
    return loss(logits, labels)


def accumulate(model, pairs):
    pairs = list(pairs)
    n = sum(count(labels) for _, labels in pairs).clamp(min=1)
    return sum(total(logits, labels) / n for logits, labels in pairs)


undeclared = Subject(kind="loss", forward=forward)
declared = Subject(
    kind="loss", name="chunked smoothed z", forward=forward, accumulate=accumulate,
    declares={"label_smoothing": EPS, "z_loss": Z, "ignore_index": IGNORE, "empty_loss": "zero", "shifts_labels": False},
)
