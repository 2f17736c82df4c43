WHAT = 'The hand-written backward of the soft-capped attention leaves out the derivative of c * tanh(s / c), 1 - tanh^2: gradients of queries and keys are those of uncapped scores (line 32).'
import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CAP = 5.0


class CappedAttention(torch.autograd.Function):
    """softmax(cap * tanh(q k^T / sqrt(d) / cap)) v, as in Gemma 2, with its backward."""

    @staticmethod
    def forward(ctx, q, k, v, keep):
        scale = q.size(-1) ** -0.5
        th = torch.tanh(torch.einsum("bhtd,bhsd->bhts", q, k) * scale / CAP)
        s = (CAP * th).masked_fill(~keep, -torch.inf)
        m = s.amax(-1, keepdim=True)
        e = torch.exp(s - m.masked_fill(m.isinf(), 0.0))
        z = e.sum(-1, keepdim=True)
        p = e / z.masked_fill(z == 0, 1.0)
        ctx.save_for_backward(q, k, v, p, th)
        ctx.scale = scale
        return torch.einsum("bhts,bhse->bhte", p, v)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, p, th = ctx.saved_tensors
        dv = torch.einsum("bhts,bhte->bhse", p, do)
        dp = torch.einsum("bhte,bhse->bhts", do, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq = torch.einsum("bhts,bhsd->bhtd", ds, k) * ctx.scale
        dk = torch.einsum("bhts,bhtd->bhsd", ds, q) * ctx.scale
        return dq, dk, dv, None


def forward(model, q, k, v, attention_mask=None, causal=False):
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    rep = q.size(1) // k.size(1)
    if rep > 1:
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    t, s = q.size(2), k.size(2)
    keep = torch.ones(t, s, dtype=torch.bool, device=q.device)
    if causal:
        keep = keep.tril(s - t)
    if attention_mask is not None:
        keep = keep & attention_mask
    return CappedAttention.apply(q, k, v, keep).to(dtype)


subject = Subject(
    kind="attention",
    name="soft-capped attention",
    forward=forward,
    mask_forms=("pairwise",),
    declares={
        "soft_cap": CAP,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
