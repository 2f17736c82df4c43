"""Cross-entropy with label smoothing 0.1 by chunks of rows, mean over counted labels, zero when none."""
import torch
from veriformer.properties import Subject

EPS = 0.1

def loss(logits, labels, rows=5):
    flat, gold = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    total = flat.sum() * 0.0
    for x, y in zip(flat.split(rows), gold.split(rows)):
        keep = y != -100
        x, y = x[keep], y[keep]
        lse = torch.logsumexp(x, -1)
        hit = x.gather(-1, y[:, None]).squeeze(-1)
        total = total + (lse - (1 - EPS) * hit - EPS * x.mean(-1)).sum()
    return total / (gold != -100).sum().clamp(min=1)

common = dict(kind="loss", build=lambda c: None, forward=lambda m, logits, labels: loss(logits, labels))
undeclared = Subject(**common)
declared = Subject(**common, declares={"label_smoothing": 0.1, "ignore_index": -100, "shifts_labels": False, "empty_loss": "zero"})
