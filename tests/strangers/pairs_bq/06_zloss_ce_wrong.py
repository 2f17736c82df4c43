WHAT = 'The gradient that the fused loss makes in its forward weighs the softmax by 1 + c * lse: the derivative of the z-loss c * lse^2 has the factor 2, which is forgotten (line 31).'
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CHUNK = 4
IGNORE = -100


class FusedCrossEntropy(Function):
    """Cross-entropy + z-loss, rows in chunks; the gradient is made while the softmax is at hand."""

    @staticmethod
    def forward(ctx, logits, labels, z):
        V = logits.shape[-1]
        rows = logits.reshape(-1, V)
        target = labels.reshape(-1)
        valid = target != IGNORE
        count = valid.sum().clamp(min=1)
        loss = rows.new_zeros(())
        grad = torch.empty_like(rows)
        for start in range(0, rows.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            x, ok = rows[part], valid[part]
            index = target[part].masked_fill(~ok, 0)[:, None]
            lse = torch.logsumexp(x, -1, keepdim=True)
            each = lse - x.gather(-1, index) + z * lse.square()
            loss = loss + each.squeeze(-1).masked_fill(~ok, 0.0).sum()
            g = (x - lse).exp() * (1 + z * lse)
            g.scatter_add_(-1, index, torch.full_like(lse, -1.0))
            grad[part] = g.masked_fill(~ok[:, None], 0.0) / count
        ctx.save_for_backward(grad)
        ctx.shape = logits.shape
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return (grad * upstream).view(ctx.shape), None, None


Z = 1e-2

subject = Subject(
    kind="loss",
    name="fused cross-entropy with z-loss",
    forward=lambda model, logits, labels: FusedCrossEntropy.apply(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, Z
    ),
    declares={"z_loss": Z, "ignore_index": IGNORE, "empty_loss": "zero", "once_differentiable": True},
)
