"""Feed-forward with recomputation: nothing but x is kept, the backward recomputes the hidden layer 64 rows at a time in scratch
buffers that are allocated once (a CUDA graph does not like allocations)."""
import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The scratch buffers of the backward are used in full length for the weight gradients even when the last tile has fewer than 64 "
    "rows: the rows left over from the tile before are counted a second time in the gradients of W1, b1, W2 and b2."
)
PLACE = "backward: scratch rows beyond n are not cleared before the weight gradients"

ROWS = 64


def gelu_and_grad(h):
    cdf = 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    pdf = torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
    return h * cdf, cdf + h * pdf


class _RecomputedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, clear_tail):
        ctx.save_for_backward(x, w1, b1, w2)
        ctx.clear_tail = clear_tail
        y = x.new_empty(x.shape[0], w2.shape[0])
        for start in range(0, x.shape[0], ROWS):
            h = torch.addmm(b1, x[start : start + ROWS], w1.T)
            y[start : start + ROWS] = torch.addmm(b2, gelu_and_grad(h)[0], w2.T)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w1, b1, w2 = ctx.saved_tensors
        rows = x.shape[0]
        dx = torch.empty_like(x)
        acc = torch.promote_types(w1.dtype, torch.float32)
        dw1, db1, dw2 = (torch.zeros_like(p, dtype=acc) for p in (w1, b1, w2))
        db2 = torch.zeros(w2.shape[0], dtype=acc, device=x.device)
        # scratch of one tile
        x_s = x.new_zeros(ROWS, x.shape[1])
        g_s = x.new_zeros(ROWS, w2.shape[0])
        a_s = x.new_zeros(ROWS, w1.shape[0])
        dh_s = x.new_zeros(ROWS, w1.shape[0])
        for start in range(0, rows, ROWS):
            n = min(ROWS, rows - start)
            x_s[:n] = x[start : start + n]
            g_s[:n] = dy[start : start + n]
            a, slope = gelu_and_grad(torch.addmm(b1, x_s[:n], w1.T))
            a_s[:n] = a
            dh_s[:n] = (g_s[:n] @ w2) * slope
            dx[start : start + n] = dh_s[:n] @ w1
            if ctx.clear_tail:
                g_s[n:] = 0
                dh_s[n:] = 0
            dw2 += g_s.T @ a_s
            db2 += g_s.sum(0)
            dw1 += dh_s.T @ x_s
            db1 += dh_s.sum(0)
        return dx, dw1.to(w1.dtype), db1.to(w1.dtype), dw2.to(w1.dtype), db2.to(w1.dtype), None


class RecomputedFFN(nn.Module):
    def __init__(self, d_model, d_ff, clear_tail=True):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(d_ff, d_model))
        self.b1 = nn.Parameter(torch.zeros(d_ff))
        self.w2 = nn.Parameter(torch.empty(d_model, d_ff))
        self.b2 = nn.Parameter(torch.zeros(d_model))
        nn.init.xavier_uniform_(self.w1)
        nn.init.xavier_uniform_(self.w2)
        self.clear_tail = clear_tail

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return _RecomputedFFN.apply(rows, self.w1, self.b1, self.w2, self.b2, self.clear_tail).view_as(x)


declared = {"activation": "gelu", "bias": True, "init": "xavier", "once_differentiable": True}
right = Subject(
    kind="feed_forward", name="recomputed-ffn", build=lambda c: RecomputedFFN(c.d_model, c.d_ff), declares=declared
)
wrong = Subject(
    kind="feed_forward",
    name="recomputed-ffn-stale",
    build=lambda c: RecomputedFFN(c.d_model, c.d_ff, clear_tail=False),
    declares=declared,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(22)

    def errors(sub, b, t, d=12, f=30):
        m = sub.build(DrawnConfig(d_model=d, num_heads=1, num_key_value_heads=1, d_ff=f))
        with torch.no_grad():
            m.b1.normal_()
            m.b2.normal_()
        x = torch.randn(b, t, d, requires_grad=True)
        wide = [p.detach().double().requires_grad_() for p in (x, m.w1, m.b1, m.w2, m.b2)]
        y = m(x)
        ref = nn.functional.gelu(wide[0] @ wide[1].T + wide[2]) @ wide[3].T + wide[4]
        g = torch.randn_like(y)
        got = torch.autograd.grad(y, [x, m.w1, m.b1, m.w2, m.b2], g)
        want = torch.autograd.grad(ref, wide, g.double())
        difference = [((a - w).abs().max() / w.abs().max()).item() for a, w in zip(got, want)]
        return (y - ref).abs().max().item(), difference[0], max(difference[1:]), min(difference[1:])

    for b, t in [(1, 1), (2, 7), (4, 16), (1, 63), (2, 64), (3, 128)]:
        assert max(errors(right, b, t)) < 1e-5 and max(errors(wrong, b, t)) < 1e-5
    for b, t in [(1, 65), (2, 50), (3, 100), (1, 500)]:
        assert max(errors(right, b, t)) < 1e-5
        forward, dx, _, least = errors(wrong, b, t)
        assert forward < 1e-5 and dx < 1e-5 and least > 0.01, (b, t, least)
    print("ok")
