"""Label smoothing over padded batches of a translation model; 0 is padding."""
import torch
from veriformer.properties import Subject

PAD = 0
EPS = 0.1


def smoothed_loss(logits, labels):
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    logp = logits.log_softmax(dim=-1)
    nll = -logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    smooth = -logp.mean(dim=-1)  # cross-entropy with the uniform distribution

    real = labels.ne(PAD)
    count = real.sum().clamp(min=1)
    nll = nll[real].sum() / count
    smooth = smooth.sum() / count
    return (1.0 - EPS) * nll + EPS * smooth


subject = Subject(
    kind="loss",
    name="smoothed cross-entropy",
    forward=lambda m, logits, labels: smoothed_loss(logits, labels),
    declares={"ignore_index": PAD, "label_smoothing": EPS, "empty_loss": "zero"},
)

WHAT = (
    'Line 19: the smoothing term is summed over padded positions too, while it is divided by the number of real ones.'
)
