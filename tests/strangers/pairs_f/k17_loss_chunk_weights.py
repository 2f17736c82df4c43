"""Cross-entropy over 64 tokens at a time, so that the float32 copy of the logits never exists for the whole batch."""
import torch
import torch.nn.functional as F
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Per-chunk means over the tokens that count are averaged with the chunk's length as weight instead of the number of its tokens "
    "that count, so labels of -100 that are unevenly spread over the chunks of 64 tokens (padding at the end) bias the loss."
)
PLACE = "ChunkedCrossEntropy.forward: weight of a chunk"


class ChunkedCrossEntropy(torch.nn.Module):
    def __init__(self, ignore_index=-100, chunk_tokens=64, weigh_by="counted"):
        super().__init__()
        self.ignore_index = ignore_index
        self.chunk_tokens = chunk_tokens
        self.weigh_by = weigh_by

    def forward(self, logits, labels):
        logits = logits.reshape(-1, logits.shape[-1])
        labels = labels.reshape(-1)
        weighted, weights = [], []
        for rows, targets in zip(logits.split(self.chunk_tokens), labels.split(self.chunk_tokens)):
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            counted = (targets != self.ignore_index).sum()
            mean = F.cross_entropy(rows, targets, ignore_index=self.ignore_index, reduction="sum") / counted.clamp(min=1)
            weight = counted if self.weigh_by == "counted" else torch.full_like(counted, len(targets))
            weighted.append(mean * weight)
            weights.append(weight)
        return torch.stack(weighted).sum() / torch.stack(weights).sum().clamp(min=1)


def _subject(weigh_by):
    return Subject(
        kind="loss",
        name=f"chunked-ce-{weigh_by}",
        build=lambda c: ChunkedCrossEntropy(weigh_by=weigh_by),
        declares={
            "ignore_index": -100,
            "label_smoothing": 0.0,
            "z_loss": 0.0,
            "shifts_labels": False,
            "empty_loss": "zero",
            "half_precision": True,
        },
    )


right = _subject("counted")
wrong = _subject("length")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(16)

    def error(sub, b, t, v, ignored):
        logits, labels = torch.randn(b, t, v) * 2, torch.randint(v, (b, t))
        for sample, where in ignored:
            labels[sample, where] = -100
        a, c = logits.clone().requires_grad_(), logits.double().requires_grad_()
        loss = sub.build(DrawnConfig())(a, labels)
        ref = F.cross_entropy(c.flatten(0, 1), labels.flatten())
        (ga,), (gc,) = torch.autograd.grad(loss, a), torch.autograd.grad(ref, c)
        return (loss - ref).abs().item() + (ga - gc).abs().max().item()

    for b, t, ignored in [(1, 1, []), (2, 5, [(1, slice(3, None))]), (4, 16, [(0, slice(1, None)), (2, slice(0, 9))]), (4, 200, [])]:
        assert error(right, b, t, 11, ignored) < 1e-5
        assert error(wrong, b, t, 11, ignored) < 1e-5
    for b, t, ignored in [(2, 100, [(1, slice(30, None))]), (1, 65, [(0, slice(0, 20))]), (4, 64, [(2, slice(None))])]:
        assert error(right, b, t, 50, ignored) < 1e-5
        assert error(wrong, b, t, 50, ignored) > 1e-2, (b, t)
    logits, nothing = torch.randn(2, 90, 7), torch.full((2, 90), -100)
    assert right.build(DrawnConfig())(logits, nothing) == 0 and wrong.build(DrawnConfig())(logits, nothing) == 0
    print("ok")
