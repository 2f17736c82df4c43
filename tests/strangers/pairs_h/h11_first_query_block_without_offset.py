"""A flash-attention kernel with its own backward, in the style of a Triton port to plain torch: the forward runs over
tiles of queries, the backward over tiles of keys and, for each, the tiles of queries that can see it. The causal mask is
aligned to the bottom right, as for a chunk that continues a cache."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

WHAT = (
    "In the backward, the first tile of queries that can see a tile of keys is found from the number of the tile alone, "
    "as if queries and keys began together. When there are more keys than queries (an offset), tiles of queries that do "
    "see the keys are skipped, and their part of all three gradients is missing: from 33 keys on."
)
PLACE = "first_row_wrong: without `- offset`"
TILE = 32


def first_row_right(key, offset):
    return max(0, key - offset) // TILE * TILE


def first_row_wrong(key, offset):
    return key // TILE * TILE


class Flash(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed, causal, first_row):
        wide = torch.promote_types(q.dtype, torch.float32)
        t, s = q.shape[-2], k.shape[-2]
        offset = s - t
        scale = q.shape[-1] ** -0.5
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.zeros(*q.shape[:-1], 1, dtype=wide, device=q.device)
        for q0 in range(0, t, TILE):
            rows = slice(q0, min(q0 + TILE, t))
            qi = q[..., rows, :].to(wide) * scale
            m = qi.new_full((*qi.shape[:-1], 1), -torch.inf)
            l, acc = torch.zeros_like(m), torch.zeros_like(out[..., rows, :])
            for k0 in range(0, min(s, rows.stop + offset) if causal else s, TILE):
                cols = slice(k0, k0 + TILE)
                x = qi @ k[..., cols, :].to(wide).mT
                x = x.masked_fill(~Flash.seen(allowed, causal, rows, cols, t, s), -torch.inf)
                new = torch.maximum(m, x.amax(-1, keepdim=True))
                safe = new.masked_fill(new.isinf(), 0)
                p, keep = (x - safe).exp(), (m - safe).exp()
                l, acc, m = l * keep + p.sum(-1, keepdim=True), acc * keep + p @ v[..., cols, :].to(wide), new
            out[..., rows, :] = acc / l.masked_fill(l == 0, 1)
            lse[..., rows, :] = torch.where(l == 0, torch.zeros_like(l), m + l.log())
        ctx.save_for_backward(q, k, v, allowed, out, lse)
        ctx.causal, ctx.first_row = causal, first_row
        return out.to(q.dtype)

    @staticmethod
    def seen(allowed, causal, rows, cols, t, s):
        part = allowed[..., rows, cols]
        if causal:
            i = torch.arange(t, device=part.device)[rows, None] + s - t
            part = part & (torch.arange(s, device=part.device)[cols] <= i)
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, allowed, out, lse = ctx.saved_tensors
        wide, t, s, scale = out.dtype, q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5
        grad = grad.to(wide)
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for k0 in range(0, s, TILE):
            cols = slice(k0, k0 + TILE)
            kj, vj = k[..., cols, :].to(wide), v[..., cols, :].to(wide)
            for q0 in range(ctx.first_row(k0, s - t) if ctx.causal else 0, t, TILE):
                rows = slice(q0, q0 + TILE)
                qi, gi = q[..., rows, :].to(wide), grad[..., rows, :]
                p = (qi @ kj.mT * scale - lse[..., rows, :]).exp()
                p = p.masked_fill(~Flash.seen(allowed, ctx.causal, rows, cols, t, s), 0)
                dv[..., cols, :] += p.mT @ gi
                ds = p * (gi @ vj.mT - delta[..., rows, :]) * scale
                dq[..., rows, :] += ds @ kj
                dk[..., cols, :] += ds.mT @ qi
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def allowed_of(q, k, mask):
    shape = (q.shape[0], 1, q.shape[-2], k.shape[-2])
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=q.device)
    return (mask[None, None] if mask.shape == shape[2:] else mask[:, None]).bool().expand(shape)


def make(first_row):
    def attend(model, q, k, v, attention_mask=None, causal=False):
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return Flash.apply(q, k, v, allowed_of(q, k, attention_mask), causal, first_row)

    return Subject(
        kind="attention",
        name="tiled attention with offset",
        forward=attend,
        mask_forms=("pairwise",),
        declares={
            "empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True,
            "once_differentiable": True,
        },
    )  # fmt: skip


right, wrong = make(first_row_right), make(first_row_wrong)


def naive(q, k, v, mask, causal):
    r = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    see = allowed_of(q, k, mask)
    t, s = see.shape[2:]
    if causal:
        see = see & torch.ones(t, s, dtype=torch.bool).tril(s - t)
    x = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~see, -1e300)
    return (x.softmax(-1) * see) @ v


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        for t, s, causal, heads, groups in (
            (7, 7, True, 2, 2), (100, 100, True, 2, 1), (100, 100, False, 2, 2), (5, 9, True, 4, 2), (20, 32, True, 2, 2),
            (20, 60, True, 2, 2), (70, 100, True, 4, 2), (1, 90, True, 2, 2), (50, 20, True, 2, 2), (60, 90, False, 2, 2),
        ):  # fmt: skip
            q, k, v = torch.randn(2, heads, t, 8), torch.randn(2, groups, s, 8), torch.randn(2, groups, s, 6)
            mask = torch.rand(2, t, s) > 0.2
            g = torch.randn(2, heads, t, 6)
            found = []
            for f, to in ((naive, torch.float64), (right, dtype), (wrong, dtype)):
                leaf = [x.to(dtype).to(to).requires_grad_() for x in (q, k, v)]
                y = f(*leaf, mask, causal) if f is naive else f.forward(None, *leaf, mask, causal)
                found.append([y.detach(), *torch.autograd.grad(y, leaf, g.to(dtype).to(to))])
            a, b = (max((x - y).abs().max().item() for x, y in zip(f, found[0])) for f in found[1:])
            assert all(torch.equal(x[0], y[0]) for x, y in [found[1:]])
            print(dtype, (t, s), "causal" if causal else "full", f"right {a:.1e} wrong {b:.1e}")
            assert a < small and (b > 0.2 if causal and s > max(t, 32) else b < small)
