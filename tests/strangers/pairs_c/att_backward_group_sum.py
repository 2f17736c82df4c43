import math

import torch
from torch import nn

from veriformer.properties import Subject

def allowed(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    ok = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    ok = ok.tril(S - T) if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class GroupedAttend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ok, bug):  # q [B, G, R, T, K], k [B, G, S, K]
        s = torch.einsum("bgrtk,bgsk->bgrts", q, k) / math.sqrt(q.shape[-1])
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0)
        ctx.save_for_backward(q, k, v, p)
        ctx.bug = bug
        return torch.einsum("bgrts,bgse->bgrte", p, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = torch.einsum("bgrte,bgse->bgrts", g, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        gather = torch.mean if ctx.bug else torch.sum  # over the query heads of a group
        dv = gather(torch.einsum("bgrts,bgrte->bgrse", p, g), 2)
        dk = gather(torch.einsum("bgrts,bgrtk->bgrsk", ds, q), 2)
        return torch.einsum("bgrts,bgsk->bgrtk", ds, k), dk, dv, None, None


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        y = GroupedAttend.apply(q.unflatten(1, (k.shape[1], -1)), k, v, allowed(q, k, mask, causal).unsqueeze(2), self.bug)
        return y.flatten(1, 2)


WHAT = 'The hand-written backward averages the gradients of keys and values over the query heads of a group instead of summing them.'
PLACE = 'hand-written backward of grouped-query attention, dk and dv'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
        declares={'once_differentiable': True, 'grouped_queries': True, 'empty_row': 'zeros'},
    )


right, wrong = make(False), make(True)
