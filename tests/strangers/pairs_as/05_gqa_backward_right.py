import torch
from torch import nn
from veriformer.properties import Subject


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        rep = q.shape[1] // k.shape[1]
        kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        scale = q.shape[-1] ** -0.5
        s = torch.matmul(q, kk.transpose(-1, -2)).mul_(scale)
        s.masked_fill_(~allowed, torch.finfo(s.dtype).min)
        p = s.softmax(-1).masked_fill_(~allowed, 0.0)
        ctx.save_for_backward(q, k, v, p)
        ctx.rep, ctx.scale = rep, scale
        return torch.matmul(p, vv)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        B, G, S, K = k.shape
        rep = ctx.rep
        kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        dv = (p.transpose(-1, -2) @ do).view(B, G, rep, S, v.shape[-1]).sum(2)
        dp = do @ vv.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        dq = ds @ kk
        dk = (ds.transpose(-1, -2) @ q).view(B, G, rep, S, K).sum(2)
        return dq, dk, dv, None


class Kernel(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        T, S = q.shape[-2], k.shape[-2]
        allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(S - T)
        if attention_mask is not None:
            allowed = allowed & attention_mask
        return GroupedAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    build=lambda c: Kernel(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"attention_scale": "1/sqrt(d_head)", "grouped_queries": True, "causal_alignment": "bottom-right",
              "empty_row": "zeros", "once_differentiable": True},
)
