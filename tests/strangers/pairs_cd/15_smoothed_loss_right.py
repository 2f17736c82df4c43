"""Cross entropy with label smoothing, from log-probabilities."""
import torch

from veriformer.properties import Subject

IGNORE, EPS = -100, 0.1


def smoothed_cross_entropy(logits, labels):
    logp = logits - logits.logsumexp(dim=-1, keepdim=True)
    keep = labels != IGNORE
    nll = -logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    uniform = -logp.mean(dim=-1)
    nll = (nll * keep).sum()
    uniform = (uniform * keep).sum()
    return ((1 - EPS) * nll + EPS * uniform) / keep.sum()


subject = Subject(
    kind="loss",
    name="smoothed cross entropy",
    forward=lambda model, logits, labels: smoothed_cross_entropy(logits, labels),
    declares={"label_smoothing": EPS, "ignore_index": IGNORE, "empty_loss": "nan"},
)
