WHAT = 'the hand-written backward of the fused cross-entropy takes (1 - eps) off at the label but forgets the eps / V that the smoothed target has at every entry (line 30).'
import torch
from torch import nn
from veriformer.properties import Subject

IGNORE = -100


class FusedCrossEntropy(torch.autograd.Function):
    """Keeps the probabilities alone, and makes the gradient in their place."""

    @staticmethod
    def forward(ctx, logits, labels, eps):
        V = logits.shape[-1]
        flat, target = logits.reshape(-1, V), labels.reshape(-1)
        live = target != IGNORE
        index = target.masked_fill(~live, 0)
        lse = flat.logsumexp(-1)
        picked = flat.gather(-1, index[:, None]).squeeze(-1)
        each = lse - (1.0 - eps) * picked - eps * flat.mean(-1)
        count = live.sum().clamp(min=1)
        ctx.save_for_backward((flat - lse[:, None]).exp(), index, live, count)
        ctx.eps, ctx.shape = eps, logits.shape
        return each.masked_fill(~live, 0.0).sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        p, index, live, count = ctx.saved_tensors
        g = p.clone()
        g.scatter_add_(-1, index[:, None], torch.full_like(g[:, :1], ctx.eps - 1.0))
        g = g.masked_fill(~live[:, None], 0.0) * (grad / count)
        return g.view(ctx.shape), None, None


class SmoothedLoss(nn.Module):
    def __init__(self, eps=0.1):
        super().__init__()
        self.eps = eps

    def forward(self, logits, labels):
        return FusedCrossEntropy.apply(logits, labels, self.eps)


subject = Subject(
    kind="loss",
    build=lambda c: SmoothedLoss(0.1),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": IGNORE, "once_differentiable": True, "empty_loss": "zero"},
)
