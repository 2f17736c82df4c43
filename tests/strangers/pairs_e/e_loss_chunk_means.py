"""Cross-entropy in chunks, so that the float32 logits of a whole batch never exist at once."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "The chunks' mean losses are averaged, so a label in a chunk that is mostly ignored counts for more than one in a full chunk."
PLACE = "reduction over the chunks"
CHUNK = 4


class ChunkedLoss(nn.Module):
    def chunks(self, logits, labels):
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        return zip(logits.split(CHUNK), labels.split(CHUNK))

    def forward(self, logits, labels):
        total, n = logits.sum() * 0.0, (labels != -100).sum()
        for x, y in self.chunks(logits, labels):
            total = total + F.cross_entropy(x, y, ignore_index=-100, reduction="sum")
        return total / n.clamp(min=1)


class MeanOfMeans(ChunkedLoss):
    def forward(self, logits, labels):
        total, n = logits.sum() * 0.0, 0
        for x, y in self.chunks(logits, labels):
            if (y != -100).any():
                total, n = total + F.cross_entropy(x, y, ignore_index=-100), n + 1
        return total / max(n, 1)


def subject(cls):
    return Subject(kind="loss", build=lambda c: cls(), forward=lambda m, logits, labels: m(logits, labels),
                   declares={"ignore_index": -100, "label_smoothing": 0.0, "shifts_labels": False, "empty_loss": "zero"})


right, wrong = subject(ChunkedLoss), subject(MeanOfMeans)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    x, y = torch.randn(2, 6, 7), torch.randint(0, 7, (2, 6))
    for ignored, clash in ((0, False), (3, True)):
        y[0, :ignored] = -100
        rows = [-(x[b, t].softmax(-1)[y[b, t]]).log() for b in range(2) for t in range(6) if y[b, t] != -100]
        want = torch.stack(rows).mean()
        dr, dw = ((m(x, y) - want).abs().item() for m in (ChunkedLoss(), MeanOfMeans()))
        print(ignored, "ignored", dr, dw)
        assert dr < 1e-5 and (dw > 1e-3) == clash
