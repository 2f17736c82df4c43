"""Cross-entropy with smoothing and z-loss; as in fused kernels the gradient is made in the forward, chunk by chunk."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

EPS, Z, IGNORE, ROWS = 0.1, 0.01, -100, 8


class FusedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels):
        V = logits.shape[-1]
        flat, target = logits.reshape(-1, V), labels.reshape(-1)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        count = (target != IGNORE).sum().clamp(min=1)
        total = torch.zeros((), dtype=wide, device=logits.device)
        grad = torch.zeros_like(flat)
        for lo in range(0, flat.shape[0], ROWS):
            x, y = flat[lo : lo + ROWS].to(wide), target[lo : lo + ROWS]
            real = y != IGNORE
            at = y.masked_fill(~real, 0)[:, None]
            lse = x.logsumexp(-1, keepdim=True)
            picked = (1 - EPS) * x.gather(1, at) + EPS * x.mean(-1, keepdim=True)
            loss = lse - picked + Z * lse.square()
            total = total + loss[real].sum()
            g = (x - lse).exp() * (1 + Z * lse) - EPS / V
            g.scatter_add_(1, at, torch.full_like(lse, EPS - 1))
            grad[lo : lo + ROWS] = (g * real[:, None] / count).to(grad.dtype)
        ctx.save_for_backward(grad.view_as(logits))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return (grad * upstream).to(grad.dtype), None


subject = Subject(
    kind="loss",
    name="fused loss",
    forward=lambda model, logits, labels: FusedCrossEntropy.apply(logits, labels),
    declares={"label_smoothing": EPS, "z_loss": Z, "empty_loss": "zero", "once_differentiable": True},
)

WHAT = (
    'The hand-made gradient of the z-loss lacks its factor 2 (d lse^2 = 2 lse p); the value of the loss is right'
    ' (line 28).'
)
