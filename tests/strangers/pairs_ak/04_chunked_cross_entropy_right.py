"""Cross-entropy that computes its gradient in the forward, rows at a time, so that no softmax of all rows is kept."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

ROWS = 4


class ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index):
        shape = logits.shape
        logits, labels = logits.reshape(-1, shape[-1]), labels.reshape(-1)
        counted = labels != ignore_index
        n = counted.sum().clamp(min=1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = logits.new_zeros((), dtype=wide)
        gradient = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            keep = counted[rows]
            target = labels[rows].masked_fill(~keep, 0)[:, None]
            logp = logits[rows].to(wide).log_softmax(-1)
            total -= logp.gather(-1, target)[:, 0].masked_fill(~keep, 0).sum()
            step = logp.exp_()
            step.scatter_add_(-1, target, -torch.ones_like(target, dtype=wide))
            gradient[rows] = (step * keep[:, None] / n).to(logits.dtype)
        ctx.save_for_backward(gradient.view(shape))
        return (total / n).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output, None, None


def chunked_cross_entropy(logits, labels, ignore_index=-100):
    return ChunkedCrossEntropy.apply(logits, labels, ignore_index)


subject = Subject(
    kind="loss",
    name="chunked cross-entropy",
    forward=lambda model, logits, labels: chunked_cross_entropy(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True},
)
