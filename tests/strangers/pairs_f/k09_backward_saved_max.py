"""FlashAttention-2 forward and backward as one torch.autograd.Function (Algorithms 1 and 2 of the paper, in plain torch)."""
import math

import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The forward saves L = m_ij + log(l_i) with the maximum of the last key tile m_ij instead of the running maximum m_i. Outputs "
    "are right; the backward rebuilds P from L, so gradients are too large for every row whose maximum lies in an earlier tile."
)
PLACE = "_FlashBase.forward: the log-sum-exp that is saved for the backward"

Br, Bc = 32, 32


def _visible(keep, causal, i0, i1, j0, j1, offset, device):
    """Bool, broadcastable to [B,H,i,j], or None where nothing is hidden."""
    visible = None
    if causal and j1 - 1 > i0 + offset:
        rows = torch.arange(i0, i1, device=device)[:, None] + offset
        visible = (torch.arange(j0, j1, device=device)[None, :] <= rows)[None, None]
    if keep is not None:
        tile = keep[..., i0:i1, j0:j1]
        visible = tile if visible is None else visible & tile
    return visible


class _FlashBase(torch.autograd.Function):
    SAVE_RUNNING_MAX = True

    @classmethod
    def _forward(cls, ctx, Q, K, V, keep, causal):
        scale, offset = 1 / math.sqrt(Q.shape[-1]), K.shape[2] - Q.shape[2]
        T, S = Q.shape[2], K.shape[2]
        O = Q.new_empty(*Q.shape[:3], V.shape[-1])
        L = Q.new_empty(*Q.shape[:3], 1)
        for i0 in range(0, T, Br):
            i1 = min(i0 + Br, T)
            Qi = Q[:, :, i0:i1]
            m_i = torch.full_like(L[:, :, i0:i1], -math.inf)
            m_ij = m_i
            l_i = torch.zeros_like(m_i)
            O_i = torch.zeros_like(O[:, :, i0:i1])
            for j0 in range(0, S, Bc):
                j1 = min(j0 + Bc, S)
                if causal and j0 > i1 - 1 + offset:
                    break
                S_ij = (Qi @ K[:, :, j0:j1].mT) * scale
                visible = _visible(keep, causal, i0, i1, j0, j1, offset, Q.device)
                if visible is not None:
                    S_ij = S_ij.masked_fill(~visible, -math.inf)
                m_ij = S_ij.amax(-1, keepdim=True)
                m_new = torch.maximum(m_i, m_ij)
                m_use = m_new.masked_fill(m_new == -math.inf, 0.0)
                P_ij = torch.exp(S_ij - m_use)
                alpha = torch.exp(m_i - m_use)
                l_i = alpha * l_i + P_ij.sum(-1, keepdim=True)
                O_i = alpha * O_i + P_ij @ V[:, :, j0:j1]
                m_i = m_new
            empty = l_i == 0
            l_safe = l_i.masked_fill(empty, 1.0)
            O[:, :, i0:i1] = O_i / l_safe
            m_saved = m_i if cls.SAVE_RUNNING_MAX else m_ij
            m_saved = m_saved.masked_fill(m_saved == -math.inf, 0.0)
            L[:, :, i0:i1] = (m_saved + l_safe.log()).masked_fill(empty, math.inf)
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.keep, ctx.causal, ctx.scale, ctx.offset = keep, causal, scale, offset
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx, dO):
        Q, K, V, O, L = ctx.saved_tensors
        T, S = Q.shape[2], K.shape[2]
        dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        D = (dO * O).sum(-1, keepdim=True)
        for j0 in range(0, S, Bc):
            j1 = min(j0 + Bc, S)
            for i0 in range(0, T, Br):
                i1 = min(i0 + Br, T)
                if ctx.causal and j0 > i1 - 1 + ctx.offset:
                    continue
                S_ij = (Q[:, :, i0:i1] @ K[:, :, j0:j1].mT) * ctx.scale
                visible = _visible(ctx.keep, ctx.causal, i0, i1, j0, j1, ctx.offset, Q.device)
                if visible is not None:
                    S_ij = S_ij.masked_fill(~visible, -math.inf)
                P_ij = torch.exp(S_ij - L[:, :, i0:i1])
                dV[:, :, j0:j1] += P_ij.mT @ dO[:, :, i0:i1]
                dP_ij = dO[:, :, i0:i1] @ V[:, :, j0:j1].mT
                dS_ij = P_ij * (dP_ij - D[:, :, i0:i1]) * ctx.scale
                dQ[:, :, i0:i1] += dS_ij @ K[:, :, j0:j1]
                dK[:, :, j0:j1] += dS_ij.mT @ Q[:, :, i0:i1]
        return dQ, dK, dV, None, None


class Flash(_FlashBase):
    @staticmethod
    def forward(ctx, Q, K, V, keep, causal):
        return Flash._forward(ctx, Q, K, V, keep, causal)


class FlashLastTileMax(_FlashBase):
    SAVE_RUNNING_MAX = False

    @staticmethod
    def forward(ctx, Q, K, V, keep, causal):
        return FlashLastTileMax._forward(ctx, Q, K, V, keep, causal)


def flash_attention(function, q, k, v, attention_mask=None, causal=False):
    dtype = q.dtype
    work = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(work), k.to(work), v.to(work)
    r = q.shape[1] // k.shape[1]
    if r > 1:
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    keep = None
    if attention_mask is not None:  # [T,S] or [B,T,S]
        keep = attention_mask.bool()
        keep = keep[None, None] if keep.dim() == 2 else keep[:, None]
    return function.apply(q, k, v, keep, causal).to(dtype)


def _subject(name, function):
    return Subject(
        kind="attention",
        name=name,
        forward=lambda model, q, k, v, attention_mask=None, causal=False: flash_attention(
            function, q, k, v, attention_mask, causal
        ),
        mask_forms=("pairwise",),
        declares={
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
            "once_differentiable": True,
            "half_precision": True,
            "memory": "linear",
        },
    )


right = _subject("flash2", Flash)
wrong = _subject("flash2-last-tile-max", FlashLastTileMax)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(8)

    def errors(sub, t, s, causal, masked):
        leaves = [torch.randn(2, 4, t, 8), torch.randn(2, 2, s, 8), torch.randn(2, 2, s, 6)]
        mask = torch.rand(2, t, s) > 0.4 if masked else None
        a = [x.clone().requires_grad_() for x in leaves]
        b = [x.double().requires_grad_() for x in leaves]
        out = sub.forward(None, *a, mask, causal)
        ok = torch.ones(t, s, dtype=torch.bool)
        ok = ok.tril(s - t) if causal else ok
        ok = ok if mask is None else ok & mask[:, None]
        ok = ok.expand(2, 4, t, s)
        scores = b[0] @ b[1].repeat_interleave(2, 1).mT / 8**0.5
        w = torch.where(ok, scores, -1e30).softmax(-1) * ok
        ref = w @ b[2].repeat_interleave(2, 1)
        g = torch.randn_like(out)
        ga, gb = torch.autograd.grad(out, a, g), torch.autograd.grad(ref, b, g.double())
        return (out - ref).abs().max().item(), max((x - y).abs().max().item() for x, y in zip(ga, gb))

    for causal in (False, True):
        for masked in (False, True):
            for t, s in [(4, 4), (7, 30), (32, 32), (50, 20)]:
                assert max(errors(right, t, s, causal, masked)) < 5e-5
                assert max(errors(wrong, t, s, causal, masked)) < 5e-5
            for t, s in [(33, 40), (90, 90), (20, 100), (100, 70)]:
                assert max(errors(right, t, s, causal, masked)) < 5e-5
                forward, backward = errors(wrong, t, s, causal, masked)
                assert forward < 5e-5 and backward > 0.1, (t, s, backward)
    print("ok")
