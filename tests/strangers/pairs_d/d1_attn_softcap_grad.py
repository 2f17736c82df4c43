import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = ("The backward of the soft cap multiplies by 1 - capped^2 where the derivative of c*tanh(s/c) is "
        "1 - (capped/c)^2, so gradients of queries and keys are wrong and even change sign for scores beyond 1.")
PLACE = "backward of the capped attention Function, the tanh factor"
CAP = 5.0


def attend(buggy):
    class Capped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, see):
            scale = q.shape[-1] ** -0.5
            capped = CAP * torch.tanh(q @ k.transpose(-1, -2) * scale / CAP)
            e = (capped - CAP).exp() * see
            z = e.sum(-1, keepdim=True)
            p = e / torch.where(z == 0, torch.ones_like(z), z)
            ctx.save_for_backward(q, k, v, p, capped)
            return p @ v

        @staticmethod
        @once_differentiable
        def backward(ctx, do):
            q, k, v, p, capped = ctx.saved_tensors
            dp = do @ v.transpose(-1, -2)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True))
            ds = ds * (1 - capped ** 2 if buggy else 1 - (capped / CAP) ** 2) * q.shape[-1] ** -0.5
            return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do, None

    return Capped.apply


class CappedAttention(nn.Module):
    def __init__(self, buggy=False):
        super().__init__()
        self.buggy = buggy

    def forward(self, q, k, v, attention_mask=None, causal=False):
        kind = q.dtype
        if kind in (torch.float16, torch.bfloat16):
            q, k, v = q.float(), k.float(), v.float()
        n, T, S = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        see = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if causal:
            see = see.tril(S - T)
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, None]
        return attend(self.buggy)(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), see).to(kind)


FACTS = {"soft_cap": CAP, "causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True,
         "once_differentiable": True}
right = Subject(kind="attention", build=lambda c: CappedAttention(), mask_forms=("padding",), declares=FACTS)
wrong = Subject(kind="attention", build=lambda c: CappedAttention(True), mask_forms=("padding",), declares=FACTS)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(2, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    for t in (q, k, v):
        t.requires_grad_()
    naive = (CAP * torch.tanh(q @ k.mT / 8 ** 0.5 / CAP)).softmax(-1) @ v
    g = torch.randn_like(naive)
    want = torch.autograd.grad(naive, (q, k, v), g)
    err = {}
    for b in (False, True):
        y = CappedAttention(b)(q, k, v)
        got = torch.autograd.grad(y, (q, k, v), g)
        err[b] = [(y - naive).abs().max().item()] + [(x - w).abs().max().item() for x, w in zip(got, want)]
    print(err)
    assert max(err[False]) < 1e-12
    assert err[True][0] < 1e-12 and err[True][1] > 1e-1 and err[True][2] > 1e-1 and err[True][3] < 1e-12
