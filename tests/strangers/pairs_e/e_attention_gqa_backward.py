"""Grouped attention with a hand-written backward."""
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = "The backward folds the key and value gradients of the query heads as [rep, groups] although heads lie as [groups, rep]."
PLACE = "backward of the grouped attention, fold of dk and dv"


def fold_right(g, groups):
    b, h, s, k = g.shape
    return g.view(b, groups, h // groups, s, k).sum(2)


def fold_wrong(g, groups):
    b, h, s, k = g.shape
    return g.view(b, h // groups, groups, s, k).sum(1)


def make(fold):
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, ok):
            rep = q.shape[1] // k.shape[1]
            kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
            s = q @ kk.transpose(-1, -2) * q.shape[-1] ** -0.5
            w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
            ctx.save_for_backward(q, kk, vv, w)
            ctx.groups = k.shape[1]
            return w @ vv

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            q, kk, vv, w = ctx.saved_tensors
            dw = g @ vv.transpose(-1, -2)
            ds = w * (dw - (dw * w).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
            return ds @ kk, fold(ds.transpose(-1, -2) @ q, ctx.groups), fold(w.transpose(-1, -2) @ g, ctx.groups), None

    class Attention(nn.Module):
        def forward(self, q, k, v, attention_mask=None, causal=False):
            t, s = q.shape[2], k.shape[2]
            ok = torch.ones(q.shape[0], 1, t, s, dtype=torch.bool, device=q.device)
            if attention_mask is not None:
                ok = ok & attention_mask.bool()[:, None, None, :]
            if causal:
                ok = ok.tril(s - t)
            return Kernel.apply(q, k, v, ok)

    return Subject(kind="attention", build=lambda c: Attention(), mask_forms=("padding",),
                   forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
                   declares={"grouped_queries": True, "once_differentiable": True, "empty_row": "zeros",
                             "causal_alignment": "bottom-right"})


right, wrong = make(fold_right), make(fold_wrong)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.double, requires_grad=True) for h in (4, 2, 2))
    kk, vv = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    want = (q @ kk.mT / 2).softmax(-1) @ vv
    r = torch.randn_like(want)
    grads = torch.autograd.grad((want * r).sum(), (q, k, v))
    for name, sub, same in (("right", right, True), ("wrong", wrong, False)):
        out = sub.forward(sub.build(None), q, k, v)
        got = torch.autograd.grad((out * r).sum(), (q, k, v))
        d = [(a - b).abs().max().item() for a, b in zip(got, grads)]
        print(name, (out - want).abs().max().item(), d)
        assert torch.allclose(out, want) and d[0] < 1e-9 and (max(d) < 1e-9) == same
