WHAT = 'in the hand-written backward the gradient of the queries is made of keys that were multiplied by scale / ln 2 and is not multiplied by ln 2 afterwards: dq is 1.4427 times the derivative, dk and dv are right (line 61)'
"""Tiled attention in base 2, as the Triton tutorial has it, with its backward."""

import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

BLOCK_N = 16
RCP_LN2 = 1.0 / math.log(2.0)
LN2 = math.log(2.0)


class _attention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed, sm_scale):
        rows = q.shape[:-1]
        m_i = q.new_full(rows, -math.inf)
        l_i = q.new_zeros(rows)
        acc = q.new_zeros(*rows, v.shape[-1])
        qk_scale = sm_scale * RCP_LN2
        for start in range(0, k.shape[-2], BLOCK_N):
            cols = slice(start, start + BLOCK_N)
            qk = (q @ k[..., cols, :].transpose(-1, -2)) * qk_scale
            qk = qk.masked_fill(~allowed[..., cols], -math.inf)
            m_ij = torch.maximum(m_i, qk.amax(-1))
            safe = torch.where(m_ij == -math.inf, 0.0, m_ij)
            p = torch.exp2(qk - safe[..., None])
            alpha = torch.exp2(m_i - safe)
            l_i = l_i * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + p @ v[..., cols, :]
            m_i = m_ij
        empty = l_i == 0
        out = acc / torch.where(empty, 1.0, l_i)[..., None]
        # rows without a key: p = exp2(qk - inf) = 0 in the backward
        M = torch.where(empty, math.inf, m_i + torch.log2(torch.where(empty, 1.0, l_i)))
        ctx.save_for_backward(q, k, v, out, M, allowed)
        ctx.sm_scale = sm_scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, out, M, allowed = ctx.saved_tensors
        delta = (out * do).sum(-1, keepdim=True)
        arg_k = k * (ctx.sm_scale * RCP_LN2)
        dq = torch.zeros_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for start in range(0, k.shape[-2], BLOCK_N):
            cols = slice(start, start + BLOCK_N)
            qk = q @ arg_k[..., cols, :].transpose(-1, -2)
            p = torch.exp2(qk - M[..., None]).masked_fill(~allowed[..., cols], 0.0)
            dv[..., cols, :] = p.transpose(-1, -2) @ do
            ds = p * (do @ v[..., cols, :].transpose(-1, -2) - delta)
            dk[..., cols, :] = (ds.transpose(-1, -2) @ q) * ctx.sm_scale
            dq += ds @ arg_k[..., cols, :]
        return dq, dk, dv, None, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[-2]
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    groups = H // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(B, H, T, S)
    return _attention.apply(q, k, v, allowed, 1.0 / math.sqrt(K)).to(dtype)


subject = Subject(
    kind="attention",
    name="base-2 flash attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
