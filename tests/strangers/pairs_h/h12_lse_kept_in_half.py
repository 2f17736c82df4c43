"""A kernel with grouped heads, without a scale on the scores (as T5 has it), and a backward that computes the weights again from the saved logsumexp; sums
are float32 (accumulators as FlashAttention-2 has them), what goes in and out may be bfloat16 or float16."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

WHAT = (
    "The logsumexp of each row is allocated like the queries, so that in bfloat16 it is rounded to 8 bits before the "
    "backward takes exp(score - lse): at a logsumexp of 20 all weights of a row are wrong by up to 6 %, at 100 by 28 %, in "
    "one direction. The forward is exact, and so are the gradients in float32."
)
PLACE = "Function.forward: `lse = q.new_empty(...)` (Wrong.lse_dtype)"
BLOCK_N = 16


def visible(allowed, n, causal, t, s):
    part = allowed[..., n : n + BLOCK_N]
    if causal:
        part = part & (torch.arange(s)[n : n + BLOCK_N] <= torch.arange(t)[:, None] + s - t).to(part.device)
    return part


class FlashGQA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, causal: bool, lse_dtype) -> Tensor:
        b, h, t, d = q.shape
        g, s = k.shape[1:3]
        acc_t = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(b, g, h // g, t, 1, dtype=lse_dtype(q, acc_t), device=q.device)
        qf = q.to(acc_t).unflatten(1, (g, -1))  # b g r t d
        low = torch.finfo(acc_t).min / 4
        m = torch.full(lse.shape, low, dtype=acc_t, device=q.device)
        l = torch.zeros_like(m)
        acc = torch.zeros(b, g, h // g, t, v.shape[-1], dtype=acc_t, device=q.device)
        for n in range(0, s, BLOCK_N):
            see = visible(allowed, n, causal, t, s)
            x = (qf @ k[:, :, None, n : n + BLOCK_N].to(acc_t).mT).masked_fill(~see, low)
            new = torch.maximum(m, x.amax(-1, keepdim=True))
            p = (x - new).exp() * see
            keep = (m - new).exp()
            l, m = l * keep + p.sum(-1, keepdim=True), new
            acc = acc * keep + p @ v[:, :, None, n : n + BLOCK_N].to(acc_t)
        l = torch.where(l == 0, torch.ones_like(l), l)
        out = (acc / l).flatten(1, 2).to(q.dtype)
        lse.copy_(m + l.log())
        ctx.save_for_backward(q, k, v, allowed, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor):
        q, k, v, allowed, out, lse = ctx.saved_tensors
        acc_t = torch.promote_types(q.dtype, torch.float32)
        b, h, t, d = q.shape
        g, s = k.shape[1:3]
        qf, of, dof = (x.to(acc_t).unflatten(1, (g, -1)) for x in (q, out, do))
        kf, vf = k.to(acc_t)[:, :, None], v.to(acc_t)[:, :, None]
        delta = (dof * of).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(qf), torch.zeros(k.shape, dtype=acc_t, device=k.device), torch.zeros_like(vf[:, :, 0])
        for n in range(0, s, BLOCK_N):
            kn, vn = kf[..., n : n + BLOCK_N, :], vf[..., n : n + BLOCK_N, :]
            see = visible(allowed, n, ctx.causal, t, s)
            p = (qf @ kn.mT - lse.to(acc_t)).masked_fill(~see, -torch.inf).exp()
            dv[:, :, n : n + BLOCK_N] = (p.mT @ dof).sum(2)
            ds = p * (dof @ vn.mT - delta)
            dq += ds @ kn
            dk[:, :, n : n + BLOCK_N] = (ds.mT @ qf).sum(2)
        return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def make(lse_dtype):
    def flash(model, q, k, v, attention_mask=None, causal=False):
        allowed = torch.ones(q.shape[0], 1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, None]
        return FlashGQA.apply(q, k, v, allowed, causal, lse_dtype)

    return Subject(
        kind="attention",
        name="grouped flash attention",
        forward=flash,
        mask_forms=("padding",),
        declares={
            "grouped_queries": True, "once_differentiable": True, "causal_alignment": "bottom-right",
            "empty_row": "zeros", "half_precision": True, "attention_scale": 1,
        },
    )  # fmt: skip


right = make(lambda q, acc_t: acc_t)
wrong = make(lambda q, acc_t: q.dtype)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.02)):
        for size, causal in ((0.25, True), (1, False), (2, False), (4, True)):
            q, k, v = (torch.randn(2, h, 60, 32).to(dtype) for h in (4, 2, 2))
            q = q * size
            g = torch.randn(2, 4, 60, 32).to(dtype)
            mask = torch.arange(60)[None] < torch.tensor([60, 41])[:, None]
            leaf = [x.double().requires_grad_() for x in (q, k, v)]
            kk, vv = (x.repeat_interleave(2, 1) for x in leaf[1:])
            see = mask[:, None, None] & (torch.ones(60, 60).tril().bool() if causal else torch.tensor(True))
            y = (leaf[0] @ kk.mT).masked_fill(~see, -torch.inf).softmax(-1) @ vv
            truth = [y.detach(), *torch.autograd.grad(y, leaf, g.double())]
            e = []
            for f in (right, wrong):
                leaf = [x.clone().requires_grad_() for x in (q, k, v)]
                y = f.forward(None, *leaf, mask, causal)
                got = [y.detach(), *torch.autograd.grad(y, leaf, g)]
                e.append([((a - b).norm() / b.norm()).item() for a, b in zip(got, truth)])
            print(dtype, "queries times", size, "causal" if causal else "full")
            print("   right: out dq dk dv", [f"{x:.1e}" for x in e[0]], " wrong", [f"{x:.1e}" for x in e[1]])
            assert max(e[0]) < bound and e[0][0] == e[1][0]
            if dtype == torch.bfloat16:
                assert max(e[1]) > {0.25: 0.005, 1: 0.02, 2: 0.03, 4: 0.06}[size] and max(e[1]) > 2 * max(e[0])
            else:
                assert max(e[1]) < bound
