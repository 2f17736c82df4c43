"""Cross-entropy over chunks of the vocabulary with an online log-sum-exp, label smoothing and z-loss."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, chunk=4, smoothing=0.1, z=1e-2, ignore=-100):
        super().__init__()
        self.chunk, self.smoothing, self.z, self.ignore = chunk, smoothing, z, ignore

    def forward(self, logits, labels):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        counted = labels != self.ignore
        logits, labels = logits[counted], labels[counted]
        n, vocab = logits.shape
        if n == 0:
            return logits.sum() * 0.0
        top = logits.new_full((n,), -torch.inf)
        total, picked, every = logits.new_zeros(n), logits.new_zeros(n), logits.new_zeros(n)
        for start in range(0, vocab, self.chunk):
            part = logits[:, start : start + self.chunk]
            new = torch.maximum(top, part.detach().amax(1))
            total = total * (top - new).exp() + (part - new[:, None]).exp().sum(1)
            inside = (labels >= start) & (labels < start + part.shape[1])
            index = (labels - start).clamp(0, part.shape[1] - 1)
            picked = picked + torch.where(inside, part.gather(1, index[:, None]).squeeze(1), 0.0)
            every = every + part.sum(1) / vocab
            top = new
        lse = top + total.log()
        nll = lse - ((1 - self.smoothing) * picked + self.smoothing * every)
        return (nll + self.z * lse.square()).mean()


def build(c: DrawnConfig):
    return ChunkedCrossEntropy()


def forward(model, logits, labels):
    return model(logits, labels)


declared = Subject(
    kind="loss", name="chunked cross-entropy", build=build, forward=forward,
    declares={
        "label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": -100, "shifts_labels": False, "empty_loss": "zero",
    },
)
undeclared = Subject(kind="loss", build=build, forward=forward)
