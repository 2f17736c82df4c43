WHAT = "the loss is the mean of the chunks' means rather than the sum over all tokens by their number (line 21): tokens in chunks with many ignored labels, or in the short last chunk, weigh more"
"""Cross entropy with z-loss over chunks of tokens, so that only a chunk's log-softmax is ever in float32."""

import torch

from veriformer.properties import Subject

IGNORE = -100


def chunked_cross_entropy(logits, labels, z_loss=1e-3, chunk_size=4):
    logits, labels = logits.flatten(0, -2), labels.flatten()
    total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    count = 0
    for rows, targets in zip(logits.split(chunk_size), labels.split(chunk_size), strict=True):
        rows = rows.to(total.dtype)
        valid = targets != IGNORE
        lse = rows.logsumexp(-1)
        nll = lse - rows.gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
        per_token = torch.where(valid, nll + z_loss * lse**2, 0.0)
        total = total + per_token.sum() / valid.sum().clamp(min=1)
        count = count + 1
    return total / max(count, 1)


subject = Subject(
    kind="loss",
    name="chunked_cross_entropy",
    forward=lambda model, logits, labels: chunked_cross_entropy(logits, labels),
    declares={"z_loss": 1e-3, "ignore_index": IGNORE, "empty_loss": "zero"},
)
