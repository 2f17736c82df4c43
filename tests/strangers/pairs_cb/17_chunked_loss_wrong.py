WHAT = "Cross-entropy in chunks of tokens: each chunk is divided by its own number of labels and the chunks are averaged (`total / len(parts)`), so that labels of chunks with much padding count more."
"""Cross-entropy that never holds the log-probabilities of all tokens at once."""
import torch
import torch.nn.functional as F

from veriformer.properties import Subject

CHUNK = 4


def chunked_cross_entropy(logits, labels, ignore_index=-100):
    logits, labels = logits.flatten(0, 1), labels.flatten()
    acc = torch.promote_types(logits.dtype, torch.float32)
    total = logits.new_zeros((), dtype=acc)
    parts = [slice(a, a + CHUNK) for a in range(0, len(labels), CHUNK)]
    for part in parts:
        summed = F.cross_entropy(logits[part].to(acc), labels[part], ignore_index=ignore_index, reduction="sum")
        total = total + summed / (labels[part] != ignore_index).sum().clamp(min=1)
    return total / len(parts)


subject = Subject(
    kind="loss",
    name="chunked loss",
    forward=lambda model, logits, labels: chunked_cross_entropy(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
