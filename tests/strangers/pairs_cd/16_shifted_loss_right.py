"""Next-token loss that shifts the labels itself."""
import torch

from veriformer.properties import Subject


def language_model_loss(logits, labels, ignore=-100):
    B, T, V = logits.shape
    logp = torch.log_softmax(logits, dim=-1)
    goal = labels[:, 1:]
    counts = (labels[:, 1:] != ignore).to(logits.dtype)
    picked = torch.gather(logp[:, :-1], 2, goal.clamp_min(0).unsqueeze(2)).squeeze(2)
    return -(picked * counts).sum() / counts.sum()


subject = Subject(
    kind="loss",
    name="next-token loss",
    forward=lambda model, logits, labels: language_model_loss(logits, labels),
    declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "nan"},
)
