WHAT = "backward of GroupedAttention folds the query heads as [rep, G] when it sums dK and dV over a group, while forward repeats keys by repeat_interleave, i.e. as [G, rep]: key-value heads receive gradients of other groups"
import math
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        rep = q.size(1) // k.size(1)
        scale = 1.0 / math.sqrt(q.size(-1))
        kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        s = torch.matmul(q, kk.mT).mul_(scale).masked_fill_(~allowed, float("-inf"))
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m.masked_fill(m == float("-inf"), 0.0))
        z = p.sum(-1, keepdim=True)
        p = p / z.masked_fill(z == 0, 1.0)
        out = p @ vv
        ctx.save_for_backward(q, k, v, p, out)
        ctx.rep, ctx.scale = rep, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, p, out = ctx.saved_tensors
        rep, (B, G, S, _) = ctx.rep, k.shape
        kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        delta = (do * out).sum(-1, keepdim=True)
        ds = p * (do @ vv.mT - delta) * ctx.scale
        dq = ds @ kk
        dk = (ds.mT @ q).view(B, rep, G, S, -1).sum(1)
        dv = (p.mT @ do).view(B, rep, G, S, -1).sum(1)
        return dq, dk, dv, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.size(2), k.size(2)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed.expand(q.size(0), q.size(1), T, S))


subject = Subject(kind="attention", forward=attend, mask_forms=("pairwise",),
                  declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right", "once_differentiable": True})
