"""Triton-tutorial style attention with a split backward: one kernel for dK and dV (outer loop over keys), one for dQ (outer loop
over queries), scores kept in base 2 throughout. Plain torch, one function a kernel."""
import math

import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "_attn_bwd_dq multiplies the accumulator by the softmax scale inside its loop over key blocks instead of once after it, so the "
    "share of every key block but the last enters dQ scaled several times. Forward, dK and dV are right."
)
PLACE = "_attn_bwd_dq: `dq = (dq + ds @ k) * sm_scale` in the loop"

BLOCK = 64
LOG2E = 1.4426950408889634


def _blocks(n):
    return [(a, min(a + BLOCK, n)) for a in range(0, n, BLOCK)]


def _qk(q, k, keep, i, j, past, causal, qk_scale):
    qk = q[:, i[0] : i[1]] @ k[:, j[0] : j[1]].transpose(1, 2) * qk_scale
    if causal:
        offs_m = torch.arange(*i, device=q.device)[:, None] + past
        offs_n = torch.arange(*j, device=q.device)[None, :]
        qk = torch.where(offs_m >= offs_n, qk, float("-inf"))
    if keep is not None:
        qk = torch.where(keep[:, None, j[0] : j[1]], qk, float("-inf"))
    return qk


def _attn_fwd(q, k, v, keep, causal, sm_scale):
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    M = q.new_zeros(q.shape[0], q.shape[1])
    past = k.shape[1] - q.shape[1]
    for i in _blocks(q.shape[1]):
        m_i = q.new_full((q.shape[0], i[1] - i[0]), float("-inf"))
        l_i = torch.zeros_like(m_i)
        acc = q.new_zeros(q.shape[0], i[1] - i[0], v.shape[2])
        for j in _blocks(k.shape[1]):
            if causal and j[0] > i[1] - 1 + past:
                break
            qk = _qk(q, k, keep, i, j, past, causal, sm_scale * LOG2E)
            m_ij = torch.maximum(m_i, qk.amax(2))
            m_ref = torch.where(m_ij == float("-inf"), 0.0, m_ij)
            p = torch.exp2(qk - m_ref[:, :, None])
            alpha = torch.exp2(m_i - m_ref)
            l_i = l_i * alpha + p.sum(2)
            acc = acc * alpha[:, :, None] + p @ v[:, j[0] : j[1]]
            m_i = m_ij
        none = l_i == 0
        l_i = torch.where(none, 1.0, l_i)
        out[:, i[0] : i[1]] = acc / l_i[:, :, None]
        M[:, i[0] : i[1]] = torch.where(none, float("inf"), m_i + torch.log2(l_i))
    return out, M


def _attn_bwd_dkdv(q, k, v, do, M, delta, keep, causal, sm_scale):
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    past = k.shape[1] - q.shape[1]
    for j in _blocks(k.shape[1]):
        k_acc, v_acc = torch.zeros_like(k[:, j[0] : j[1]]), torch.zeros_like(v[:, j[0] : j[1]])
        for i in _blocks(q.shape[1]):
            if causal and j[0] > i[1] - 1 + past:
                continue
            p = torch.exp2(_qk(q, k, keep, i, j, past, causal, sm_scale * LOG2E) - M[:, i[0] : i[1], None])
            g = do[:, i[0] : i[1]]
            v_acc = v_acc + p.transpose(1, 2) @ g
            ds = p * (g @ v[:, j[0] : j[1]].transpose(1, 2) - delta[:, i[0] : i[1], None])
            k_acc = k_acc + ds.transpose(1, 2) @ q[:, i[0] : i[1]]
        dk[:, j[0] : j[1]] = k_acc * sm_scale
        dv[:, j[0] : j[1]] = v_acc
    return dk, dv


def _attn_bwd_dq(q, k, v, do, M, delta, keep, causal, sm_scale, scale_in_loop):
    dq = torch.zeros_like(q)
    past = k.shape[1] - q.shape[1]
    for i in _blocks(q.shape[1]):
        g = do[:, i[0] : i[1]]
        acc = torch.zeros_like(q[:, i[0] : i[1]])
        for j in _blocks(k.shape[1]):
            if causal and j[0] > i[1] - 1 + past:
                break
            p = torch.exp2(_qk(q, k, keep, i, j, past, causal, sm_scale * LOG2E) - M[:, i[0] : i[1], None])
            ds = p * (g @ v[:, j[0] : j[1]].transpose(1, 2) - delta[:, i[0] : i[1], None])
            acc = acc + ds @ k[:, j[0] : j[1]]
            if scale_in_loop:
                acc = acc * sm_scale
        dq[:, i[0] : i[1]] = acc if scale_in_loop else acc * sm_scale
    return dq


class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keep, causal, scale_in_loop):
        ctx.sm_scale = 1 / math.sqrt(q.shape[2])
        out, M = _attn_fwd(q, k, v, keep, causal, ctx.sm_scale)
        ctx.save_for_backward(q, k, v, out, M)
        ctx.keep, ctx.causal, ctx.scale_in_loop = keep, causal, scale_in_loop
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, out, M = ctx.saved_tensors
        delta = (out * do).sum(2)
        args = (q, k, v, do, M, delta, ctx.keep, ctx.causal, ctx.sm_scale)
        dk, dv = _attn_bwd_dkdv(*args)
        return _attn_bwd_dq(*args, ctx.scale_in_loop), dk, dv, None, None, None


class TritonStyle(torch.nn.Module):
    def __init__(self, scale_in_loop=False):
        super().__init__()
        self.scale_in_loop = scale_in_loop

    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H = q.shape[:2]
        wide = torch.promote_types(q.dtype, torch.float32)
        fold = lambda x: x.to(wide).repeat_interleave(H // x.shape[1], 1).flatten(0, 1)  # noqa: E731
        keep = None if attention_mask is None else attention_mask.bool().repeat_interleave(H, 0)
        out = _attention.apply(fold(q), fold(k), fold(v), keep, causal, self.scale_in_loop)
        return out.unflatten(0, (B, H)).to(q.dtype)


def _make(name, scale_in_loop):
    return Subject(
        kind="attention",
        name=name,
        build=lambda c: TritonStyle(scale_in_loop),
        mask_forms=("padding",),
        declares={
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
            "padding_side": "both",
            "once_differentiable": True,
            "half_precision": True,
            "memory": "linear",
        },
    )


right = _make("triton-style", False)
wrong = _make("triton-style-dq", True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(11)

    def errors(sub, t, s, causal, padded):
        leaves = [torch.randn(2, 4, t, 8), torch.randn(2, 2, s, 8), torch.randn(2, 2, s, 4)]
        keep = torch.ones(2, s, dtype=torch.bool)
        if padded:
            keep[1, : s // 4] = False
        a, b = [x.clone().requires_grad_() for x in leaves], [x.double().requires_grad_() for x in leaves]
        out = sub.build(DrawnConfig())(*a, keep if padded else None, causal)
        ok = keep[:, None, None].expand(2, 4, t, s)
        ok = ok & torch.ones(t, s, dtype=torch.bool).tril(s - t) if causal else ok
        w = torch.where(ok, b[0] @ b[1].repeat_interleave(2, 1).mT / 8**0.5, -1e30).softmax(-1) * ok
        ref = w @ b[2].repeat_interleave(2, 1)
        g = torch.randn_like(out)
        ga, gb = torch.autograd.grad(out, a, g), torch.autograd.grad(ref, b, g.double())
        return [(out - ref).abs().max().item()] + [(x - y).abs().max().item() for x, y in zip(ga, gb)]

    for padded in (False, True):
        for causal in (False, True):
            for t, s in [(4, 4), (64, 64), (100, 50), (9, 33)]:
                assert max(errors(right, t, s, causal, padded)) < 5e-5
                assert max(errors(wrong, t, s, causal, padded)) < 5e-5
            for t, s in [(65, 65), (150, 150), (20, 130), (130, 80)]:
                assert max(errors(right, t, s, causal, padded)) < 5e-5
                forward, dq, dk, dv = errors(wrong, t, s, causal, padded)
                assert max(forward, dk, dv) < 5e-5 and dq > 0.02, (t, s, causal, dq)
    print("ok")
