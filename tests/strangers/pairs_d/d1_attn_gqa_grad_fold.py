import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = ("The hand-written backward folds the query heads' dK and dV onto the key-value heads as h % G where the forward "
        "shares them as h // (H / G), so with 1 < G < H gradients reach the wrong key-value head.")
PLACE = "backward of the grouped attention Function, the reduction of dK and dV"


def make(buggy):
    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, see):
            n = q.shape[1] // k.shape[1]
            kk, vv = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
            s = (q @ kk.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~see, -torch.inf)
            e = (s - s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)).exp()
            z = e.sum(-1, keepdim=True)
            p = e / torch.where(z == 0, torch.ones_like(z), z)
            ctx.save_for_backward(q, kk, vv, p)
            ctx.heads = k.shape[1], n
            return p @ vv

        @staticmethod
        @once_differentiable
        def backward(ctx, do):
            q, kk, vv, p = ctx.saved_tensors
            G, n = ctx.heads
            dp = do @ vv.transpose(-1, -2)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
            dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
            if buggy:
                fold = lambda t: t.unflatten(1, (n, G)).sum(1)
            else:
                fold = lambda t: t.unflatten(1, (G, n)).sum(2)
            return ds @ kk, fold(dk), fold(dv), None

    class Attention(nn.Module):
        def forward(self, q, k, v, attention_mask=None, causal=False):
            kind = q.dtype
            if kind in (torch.float16, torch.bfloat16):
                q, k, v = q.float(), k.float(), v.float()
            T, S = q.shape[2], k.shape[2]
            see = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
            if causal:
                see = see.tril(S - T)
            if attention_mask is not None:
                see = see & attention_mask.bool()[:, None, None]
            return Grouped.apply(q, k, v, see).to(kind)

    return Attention()


FACTS = {"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True, "once_differentiable": True}
right = Subject(kind="attention", build=lambda c: make(False), mask_forms=("padding",), declares=FACTS, name="grouped")
wrong = Subject(kind="attention", build=lambda c: make(True), mask_forms=("padding",), declares=FACTS, name="grouped")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    naive = (q @ k.repeat_interleave(2, 1).mT / 8 ** 0.5).softmax(-1) @ v.repeat_interleave(2, 1)
    g = torch.randn_like(naive)
    want = torch.autograd.grad(naive, (q, k, v), g)
    err = {}
    for b in (False, True):
        y = make(b)(q, k, v)
        got = torch.autograd.grad(y, (q, k, v), g)
        err[b] = [(y - naive).abs().max().item()] + [(x - w).abs().max().item() for x, w in zip(got, want)]
    print(err)
    assert max(err[False]) < 1e-12
    assert err[True][0] < 1e-12 and err[True][1] < 1e-12 and err[True][2] > 1e-2 and err[True][3] > 1e-2
