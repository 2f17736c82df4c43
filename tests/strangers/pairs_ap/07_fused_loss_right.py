"""Cross entropy in the manner of Liger: rows by chunks, the gradient is written while the loss is computed."""
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index, chunk):
        rows, vocab = logits.shape
        wide = torch.promote_types(logits.dtype, torch.float32)
        grad = torch.empty_like(logits)
        loss = logits.new_zeros((), dtype=wide)
        valid = labels != ignore_index
        count = valid.sum().clamp(min=1).to(wide)
        for lo in range(0, rows, chunk):
            block = logits[lo : lo + chunk].to(wide)
            real = valid[lo : lo + chunk]
            target = labels[lo : lo + chunk].masked_fill(~real, 0).unsqueeze(1)
            log_probs = block.log_softmax(dim=-1)
            loss -= log_probs.gather(1, target).squeeze(1).masked_fill(~real, 0.0).sum()
            delta = log_probs.exp()
            delta.scatter_add_(1, target, -torch.ones_like(target, dtype=wide))
            grad[lo : lo + chunk] = (delta.masked_fill(~real.unsqueeze(1), 0.0) / count).to(logits.dtype)
        ctx.save_for_backward(grad)
        return (loss / count).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grad,) = ctx.saved_tensors
        return grad * grad_output, None, None, None


class FusedLoss(nn.Module):
    def __init__(self, ignore_index=-100, chunk=4):
        super().__init__()
        self.ignore_index, self.chunk = ignore_index, chunk

    def forward(self, logits, labels):
        return FusedCrossEntropy.apply(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), self.ignore_index, self.chunk
        )


subject = Subject(
    kind="loss",
    name="fused cross entropy",
    build=lambda c: FusedLoss(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True},
)
