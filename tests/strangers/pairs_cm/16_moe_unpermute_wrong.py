"""Experts by sorting (as grouped GEMMs want it): tokens are permuted by expert, run expert by expert, and put back."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP = 4, 2


class SortedExperts(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, dim) * hidden**-0.5)

    def route(self, flat):
        probs = self.gate(flat).softmax(-1)
        top, expert = probs.topk(TOP, -1)
        return top / top.sum(-1, keepdim=True), expert

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, expert = self.route(flat)
        slots = expert.flatten()
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=EXPERTS).tolist()
        grouped = flat[order // TOP].split(counts)
        done = torch.cat([F.silu(rows @ self.up[e]) @ self.down[e] for e, rows in enumerate(grouped)])
        done = done.index_select(0, order).view(-1, TOP, x.shape[-1])
        return (done * weight.unsqueeze(-1)).sum(1).view_as(x)


def router(model, x):
    weight, expert = model.route(x.reshape(-1, x.shape[-1]))
    dense = torch.zeros(weight.shape[0], EXPERTS, dtype=weight.dtype, device=x.device)
    return dense.scatter(1, expert, weight).view(*x.shape[:-1], EXPERTS)


subject = Subject(
    kind="feed_forward",
    build=lambda c: SortedExperts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "activation": "other", "structure": "other", "bias": False},
)

WHAT = 'The outputs of the experts are put back with the permutation itself instead of its inverse: tokens get what experts made of other tokens (line 31).'
