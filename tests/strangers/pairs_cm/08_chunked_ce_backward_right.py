"""Cross-entropy over chunks of the vocabulary, with a backward of its own: no [tokens, vocab] probabilities are kept."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CHUNK = 8
IGNORE = -100


class ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels):
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        counted = labels != IGNORE
        lse = torch.full(labels.shape, -torch.inf, dtype=wide.dtype, device=wide.device)
        for piece in wide.split(CHUNK, -1):
            lse = torch.logaddexp(lse, piece.logsumexp(-1))
        target = labels.masked_fill(~counted, 0)
        nll = (lse - wide.gather(-1, target.unsqueeze(-1)).squeeze(-1)).masked_fill(~counted, 0.0)
        n_tokens = counted.sum().clamp(min=1)
        ctx.save_for_backward(logits, target, counted, lse, n_tokens)
        return (nll.sum() / n_tokens).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        logits, target, counted, lse, n_tokens = ctx.saved_tensors
        factor = counted.unsqueeze(-1) * (upstream.to(lse.dtype) / n_tokens)
        grad = torch.empty_like(logits)
        for start in range(0, logits.shape[-1], CHUNK):
            piece = logits[..., start : start + CHUNK].to(lse.dtype)
            probs = (piece - lse.unsqueeze(-1)).exp()
            columns = torch.arange(start, start + piece.shape[-1], device=logits.device)
            hit = (target.unsqueeze(-1) == columns).to(lse.dtype)
            grad[..., start : start + CHUNK] = ((probs - hit) * factor).to(grad.dtype)
        return grad, None


subject = Subject(
    kind="loss",
    forward=lambda model, logits, labels: ChunkedCrossEntropy.apply(logits, labels),
    declares={"ignore_index": IGNORE, "empty_loss": "zero", "once_differentiable": True},
)
