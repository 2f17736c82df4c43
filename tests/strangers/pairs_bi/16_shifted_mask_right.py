import torch
from torch.nn import functional as F

from veriformer.properties import Subject

IGNORE_INDEX = -100


def causal_lm_loss(logits, labels):
    """Token t predicts label t + 1; prompts and padding carry IGNORE_INDEX."""
    shift_logits = logits[:, :-1]
    shift_labels = labels[:, 1:]
    keep = shift_labels.ne(IGNORE_INDEX)
    logp = F.log_softmax(shift_logits.float() if logits.dtype == torch.bfloat16 else shift_logits, dim=-1)
    picked = logp.gather(-1, shift_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * keep).sum() / keep.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="loss of a causal language model",
    forward=lambda model, logits, labels: causal_lm_loss(logits, labels),
    declares={"shifts_labels": True, "ignore_index": IGNORE_INDEX, "empty_loss": "zero"},
)
