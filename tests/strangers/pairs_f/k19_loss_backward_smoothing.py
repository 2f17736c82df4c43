"""Label-smoothed cross-entropy in the manner of the fused kernels: the vocabulary in blocks, forward and backward by hand.

Forward keeps one logsumexp a token; backward recomputes the softmax block by block and writes the gradient of the logits.
"""
import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The backward spreads the smoothing mass as eps / (columns of the block) instead of eps / V, so with more than one block of 512 "
    "columns the target that is subtracted sums to more than 1 and the gradient of each token no longer sums to zero."
)
PLACE = "backward: uniform share of the smoothed target"

BLOCK_V = 512
EPS = 0.1


def _blocks(vocab):
    for lo in range(0, vocab, BLOCK_V):
        yield lo, min(lo + BLOCK_V, vocab)


class _SmoothedCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index, share_of_block):
        vocab = logits.shape[1]
        counted = labels != ignore_index
        target = labels.masked_fill(~counted, 0)
        top = torch.full_like(logits[:, 0], -torch.inf)
        total, summed = torch.zeros_like(top), torch.zeros_like(top)
        for lo, hi in _blocks(vocab):
            block = logits[:, lo:hi]
            new_top = torch.maximum(top, block.amax(1))
            total = total * (top - new_top).exp() + (block - new_top[:, None]).exp().sum(1)
            summed += block.sum(1)
            top = new_top
        lse = top + total.log()
        picked = logits.gather(1, target[:, None])[:, 0]
        losses = lse - (1 - EPS) * picked - EPS / vocab * summed
        n = counted.sum()
        ctx.save_for_backward(logits, target, counted, lse, n)
        ctx.share_of_block = share_of_block
        return losses.masked_fill(~counted, 0.0).sum() / n.clamp(min=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, target, counted, lse, n = ctx.saved_tensors
        vocab = logits.shape[1]
        factor = (grad / n.clamp(min=1) * counted.to(logits.dtype))[:, None]
        dlogits = torch.empty_like(logits)
        for lo, hi in _blocks(vocab):
            p = (logits[:, lo:hi] - lse[:, None]).exp()
            onehot = (torch.arange(lo, hi, device=logits.device)[None] == target[:, None]).to(logits.dtype)
            uniform = EPS / ((hi - lo) if ctx.share_of_block else vocab)
            dlogits[:, lo:hi] = (p - (1 - EPS) * onehot - uniform) * factor
        return dlogits, None, None, None


class FusedLabelSmoothing(torch.nn.Module):
    def __init__(self, share_of_block=False):
        super().__init__()
        self.share_of_block = share_of_block

    def forward(self, logits, labels):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return _SmoothedCE.apply(wide.flatten(0, -2), labels.flatten(), -100, self.share_of_block)


def _subject(name, **kwargs):
    return Subject(
        kind="loss",
        name=name,
        build=lambda c: FusedLabelSmoothing(**kwargs),
        declares={
            "label_smoothing": EPS,
            "ignore_index": -100,
            "z_loss": 0.0,
            "shifts_labels": False,
            "empty_loss": "zero",
            "once_differentiable": True,
            "half_precision": True,
        },
    )


right = _subject("fused-smoothing")
wrong = _subject("fused-smoothing-block-share", share_of_block=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(18)

    def errors(sub, b, t, v):
        logits, labels = torch.randn(b, t, v) * 2, torch.randint(v, (b, t))
        labels[0, : t // 3] = -100
        a, c = logits.clone().requires_grad_(), logits.double().requires_grad_()
        loss = sub.build(DrawnConfig())(a, labels)
        ref = torch.nn.functional.cross_entropy(c.flatten(0, 1), labels.flatten(), label_smoothing=EPS)
        (ga,), (gc,) = torch.autograd.grad(loss, a), torch.autograd.grad(ref, c)
        return (loss - ref).abs().item(), ((ga - gc).abs().max() * b * t).item(), (ga.sum(-1).abs().max() * b * t).item()

    for b, t, v in [(2, 5, 11), (1, 1, 2), (2, 30, 512), (4, 64, 100)]:
        assert max(errors(right, b, t, v)) < 1e-4
        assert max(errors(wrong, b, t, v)) < 1e-4
    for b, t, v in [(2, 5, 513), (2, 30, 1024), (1, 16, 3000)]:
        assert max(errors(right, b, t, v)) < 1e-4
        forward, _, total = errors(wrong, b, t, v)
        assert forward < 1e-4 and total > 0.05, (v, total)
    print("ok")
