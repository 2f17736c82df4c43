"""Cross-entropy by chunks of rows, so that no second tensor of the size of the logits in float32 is needed.

The gradient is made in the forward, chunk by chunk, and kept until the backward.
"""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, chunk_size, ignore_index):
        rows = logits.reshape(-1, logits.shape[-1])
        flat = labels.reshape(-1)
        acc = torch.promote_types(rows.dtype, torch.float32)
        count = (flat != ignore_index).sum().clamp(min=1)
        grad = torch.empty_like(rows)
        total = torch.zeros((), dtype=acc, device=rows.device)
        for start in range(0, rows.shape[0], chunk_size):
            part = rows[start : start + chunk_size].to(acc)
            target = flat[start : start + chunk_size]
            valid = target != ignore_index
            safe = torch.where(valid, target, 0)
            logp = part.log_softmax(dim=-1)
            picked = logp.gather(1, safe[:, None])[:, 0]
            total = total - torch.where(valid, picked, 0.0).sum()
            dpart = logp.exp()
            dpart[torch.arange(len(safe), device=rows.device), safe] -= 1.0
            dpart = torch.where(valid[:, None], dpart, 0.0) / count
            grad[start : start + chunk_size] = dpart.to(rows.dtype)
        ctx.save_for_backward(grad)
        ctx.shape = logits.shape
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grad,) = ctx.saved_tensors
        grad = grad * grad_output
        return grad.reshape(ctx.shape).to(grad.dtype), None, None, None


def chunked_cross_entropy(logits, labels, chunk_size=4, ignore_index=-100):
    return ChunkedCrossEntropy.apply(logits, labels, chunk_size, ignore_index)


subject = Subject(
    kind="loss",
    name="chunked cross-entropy",
    forward=lambda model, logits, labels: chunked_cross_entropy(logits, labels),
    declares={
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "shifts_labels": False,
        "empty_loss": "zero",
        "z_loss": 0,
        "once_differentiable": True,
    },
)
