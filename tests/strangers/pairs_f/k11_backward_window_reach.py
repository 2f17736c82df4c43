"""Sliding-window attention (always causal, window 48) with a tiled forward and a tiled backward that touch only the band."""
import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The backward ends the walk over query tiles at first_key + window instead of last_key + window, so queries that see only the "
    "later keys of a key tile contribute nothing to those keys' gradients (nor get one for themselves). The forward is right."
)
PLACE = "query_range: the end of the band is reckoned from the first key of the tile"

WINDOW = 48
TILE = 32


def key_range(i0, i1, shift, S):
    """Keys that any of the queries i0..i1-1 can see, begun at a tile boundary."""
    lo = max(0, i0 + shift - WINDOW + 1) // TILE * TILE
    return lo, max(0, min(S, i1 + shift))


def query_range(j0, j1, shift, T, from_first_key):
    """Queries that can see any of the keys j0..j1-1, begun at a tile boundary."""
    lo = max(0, j0 - shift) // TILE * TILE
    far = j0 if from_first_key else j1 - 1
    return lo, min(T, far + WINDOW - shift)


def band(i0, i1, j0, j1, shift, keep, device):
    ahead = torch.arange(i0, i1, device=device)[:, None] + shift - torch.arange(j0, j1, device=device)[None, :]
    visible = ((ahead >= 0) & (ahead < WINDOW))[None, None]
    return visible if keep is None else visible & keep[:, None, None, j0:j1]


class SlidingWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keep, from_first_key):
        T, S = q.shape[2], k.shape[2]
        shift, scale = S - T, q.shape[-1] ** -0.5
        out = q.new_zeros(*q.shape[:3], v.shape[-1])
        lse = q.new_full(q.shape[:3], torch.inf)
        for i0 in range(0, T, TILE):
            i1 = min(i0 + TILE, T)
            lo, hi = key_range(i0, i1, shift, S)
            if lo >= hi:
                continue
            # the band of one query tile is a few key tiles wide: one softmax over it
            s = (q[:, :, i0:i1] @ k[:, :, lo:hi].mT * scale).masked_fill(~band(i0, i1, lo, hi, shift, keep, q.device), -torch.inf)
            z = torch.logsumexp(s, -1)
            z = torch.where(z == -torch.inf, torch.inf, z)
            lse[:, :, i0:i1] = z
            out[:, :, i0:i1] = (s - z[..., None]).exp() @ v[:, :, lo:hi]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keep, ctx.from_first_key = keep, from_first_key
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, out, lse = ctx.saved_tensors
        T, S = q.shape[2], k.shape[2]
        shift, scale = S - T, q.shape[-1] ** -0.5
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (do * out).sum(-1, keepdim=True)
        for j0 in range(0, S, TILE):
            j1 = min(j0 + TILE, S)
            kj, vj = k[:, :, j0:j1], v[:, :, j0:j1]
            lo, hi = query_range(j0, j1, shift, T, ctx.from_first_key)
            for i0 in range(lo, hi, TILE):
                i1 = min(i0 + TILE, T)
                s = (q[:, :, i0:i1] @ kj.mT * scale).masked_fill(~band(i0, i1, j0, j1, shift, ctx.keep, q.device), -torch.inf)
                p = (s - lse[:, :, i0:i1, None]).exp()
                dv[:, :, j0:j1] += p.mT @ do[:, :, i0:i1]
                ds = p * (do[:, :, i0:i1] @ vj.mT - delta[:, :, i0:i1]) * scale
                dq[:, :, i0:i1] += ds @ kj
                dk[:, :, j0:j1] += ds.mT @ q[:, :, i0:i1]
        return dq, dk, dv, None, None


def sliding_window_attention(q, k, v, attention_mask=None, from_first_key=False):
    dtype = q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(compute) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    keep = None if attention_mask is None else attention_mask.bool()
    return SlidingWindow.apply(q, k, v, keep, from_first_key).to(dtype)


def subject(name, from_first_key):
    return Subject(
        kind="attention",
        name=name,
        forward=lambda model, q, k, v, attention_mask=None: sliding_window_attention(q, k, v, attention_mask, from_first_key),
        mask_forms=("padding",),
        declares={
            "causal": True,
            "window": WINDOW,
            "causal_alignment": "bottom-right",
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "padding_side": "both",
            "once_differentiable": True,
            "half_precision": True,
            "memory": "linear",
        },
    )


right = subject("window-band", False)
wrong = subject("window-band-short", True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(10)

    def errors(sub, t, s, padded):
        leaves = [torch.randn(2, 4, t, 8), torch.randn(2, 2, s, 8), torch.randn(2, 2, s, 8)]
        keep = torch.ones(2, s, dtype=torch.bool)
        if padded:
            keep[0, s // 2 : s // 2 + s // 3] = False
        a, b = [x.clone().requires_grad_() for x in leaves], [x.double().requires_grad_() for x in leaves]
        out = sub.forward(None, *a, keep if padded else None)
        gap = torch.arange(t)[:, None] + s - t - torch.arange(s)
        ok = ((gap >= 0) & (gap < WINDOW) & keep[:, None, None]).expand(2, 4, t, s)
        scores = b[0] @ b[1].repeat_interleave(2, 1).mT / 8**0.5
        ref = (torch.where(ok, scores, -1e30).softmax(-1) * ok) @ b[2].repeat_interleave(2, 1)
        g = torch.randn_like(out)
        ga, gb = torch.autograd.grad(out, a, g), torch.autograd.grad(ref, b, g.double())
        return (out - ref).abs().max().item(), max((x - y).abs().max().item() for x, y in zip(ga, gb))

    for padded in (False, True):
        for t, s in [(1, 1), (5, 5), (40, 40), (60, 60), (64, 64), (3, 40), (60, 20), (30, 75)]:
            assert max(errors(right, t, s, padded)) < 5e-5
            assert max(errors(wrong, t, s, padded)) < 5e-5, (t, s)
        for t, s in [(75, 75), (128, 128), (200, 200), (100, 140), (150, 100)]:
            assert max(errors(right, t, s, padded)) < 5e-5
            forward, backward = errors(wrong, t, s, padded)
            assert forward < 5e-5 and backward > 0.05, (t, s, backward)
    print("ok")
