import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

CHUNK = 8


class ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows; no [N, V] of log-probabilities is kept."""

    @staticmethod
    def forward(ctx, logits, labels, ignore):
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        grad = torch.empty_like(rows)
        count = int((flat != ignore).sum())
        denominator = max(count, 1)
        loss = rows.new_zeros(())
        for lo in range(0, rows.shape[0], CHUNK):
            z, y = rows[lo : lo + CHUNK], flat[lo : lo + CHUNK]
            keep = y != ignore
            safe = torch.where(keep, y, torch.zeros_like(y))
            lse = z.logsumexp(-1, keepdim=True)
            nll = (lse - z.gather(1, safe[:, None])).squeeze(1)
            loss += (nll * keep).sum() / denominator
            g = (z - lse).exp_()
            g.scatter_add_(1, safe[:, None], -torch.ones_like(lse))
            grad[lo : lo + CHUNK] = g * keep[:, None] / denominator
        ctx.save_for_backward(grad.view_as(logits))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return grad * upstream, None, None


subject = Subject(kind="loss", forward=lambda model, logits, labels: ChunkedCrossEntropy.apply(logits, labels, -100),
                  declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True})
