
import torch
from torch import nn

from veriformer.properties import Subject

def allowed(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    ok = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    ok = ok.tril(S - T) if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ok, bug):
        scale = q.shape[-1] ** -0.5
        s = q @ k.mT * scale
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.bug = scale, bug
        return p @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        dp = do @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        dq = ds @ k * ctx.scale
        dk = ds.mT @ q * (1 if ctx.bug else ctx.scale)
        return dq, dk, p.mT @ do, None, None


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        return Attend.apply(q, k, v, allowed(q, k, mask, causal), self.bug)


WHAT = 'The hand-written backward forgets the factor 1/sqrt(d_head) in the gradient of the keys; the forward and the other gradients are right.'
PLACE = 'hand-written backward of attention, gradient of k'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
        declares={'once_differentiable': True, 'grouped_queries': True, 'empty_row': 'zeros'},
    )


right, wrong = make(False), make(True)
