"""Cross-entropy in chunks of tokens, so that the logarithm of the softmax is never whole in memory, with PaLM's z-loss."""
import torch

from veriformer.properties import Subject

CHUNK, Z, IGNORED = 8, 1e-2, -100


def chunk_sum(logits, labels):
    """The sum over one chunk, and how many of its tokens count."""
    counted = labels != IGNORED
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    log_z = logits.logsumexp(-1)
    right = logits.gather(-1, labels.masked_fill(~counted, 0)[:, None])[:, 0]
    each = log_z - right
    each = each.masked_fill(~counted, 0.0)
    each = each + Z * log_z.square()
    return each.sum(), counted.sum()


def chunked_loss(logits, labels):
    logits, labels = logits.flatten(0, -2), labels.flatten()
    sums, counts = zip(*(chunk_sum(*pair) for pair in zip(logits.split(CHUNK), labels.split(CHUNK))))
    return sum(sums) / sum(counts).clamp(min=1)


subject = Subject(
    kind="loss",
    name="cross-entropy in chunks with z-loss",
    forward=lambda model, logits, labels: chunked_loss(logits, labels),
    declares={"z_loss": Z, "ignore_index": IGNORED, "empty_loss": "zero"},
)

WHAT = (
    'Line 16: '
    'The z-loss is added behind the masking (this line and the next are exchanged): ignored tokens have a z-loss and a gradient too.'
)
