"""Attention with capped scores; the cap is a small autograd function that saves memory."""
import math
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = "The soft cap's backward computes 1 - (x/c)^2 from the raw scores where 1 - tanh(x/c)^2 belongs (the capped ones)."
PLACE = "SoftCap.backward, the saved tensor"
CAP = 3.0


class SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s):
        y = CAP * torch.tanh(s / CAP)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return g * (1 - (y / CAP) ** 2)


class SoftCapRaw(SoftCap):
    @staticmethod
    def forward(ctx, s):
        ctx.save_for_backward(s)
        return CAP * torch.tanh(s / CAP)


class Attention(nn.Module):
    def __init__(self, cap):
        super().__init__()
        self.cap = cap

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))
        s = self.cap.apply(torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1]))
        ok = torch.ones_like(s, dtype=torch.bool)
        if attention_mask is not None:
            ok = ok & attention_mask.bool()[:, None, None, :]
        if causal:
            ok = ok.tril(s.shape[-1] - s.shape[-2])
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return torch.einsum("bhts,bhse->bhte", w, v)


def subject(cap):
    return Subject(kind="attention", build=lambda c: Attention(cap), mask_forms=("padding",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   declares={"soft_cap": CAP, "grouped_queries": True, "once_differentiable": True, "empty_row": "zeros",
                             "causal_alignment": "bottom-right"})


right, wrong = subject(SoftCap), subject(SoftCapRaw)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    q, k, v = (2 * torch.randn(2, 2, 4, 4, dtype=torch.double) for _ in range(3))
    q.requires_grad_()
    want = (CAP * torch.tanh(q @ k.mT / 2 / CAP)).softmax(-1) @ v
    grad, = torch.autograd.grad(want.pow(2).sum(), q)
    for name, sub, same in (("right", right, True), ("wrong", wrong, False)):
        out = sub.forward(sub.build(None), q, k, v)
        d = (torch.autograd.grad(out.pow(2).sum(), q)[0] - grad).abs().max().item()
        print(name, (out - want).abs().max().item(), d)
        assert torch.allclose(out, want) and (d < 1e-9) == same
