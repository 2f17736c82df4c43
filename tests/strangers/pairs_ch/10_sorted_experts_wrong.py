"""Mixture of experts without loops over tokens: token copies are sorted by expert, each expert gets one slice."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, dim, hidden) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, hidden, dim) * hidden**-0.5)

    def route(self, x):
        probs = self.gate(x).softmax(-1)
        weight, expert = probs.topk(CHOSEN, -1)
        return weight / weight.sum(-1, keepdim=True), expert

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, expert = self.route(x)
        order = expert.flatten().argsort(stable=True)
        counts = torch.bincount(expert.flatten(), minlength=EXPERTS).tolist()
        rows = x[order // CHOSEN].split(counts)
        done = torch.cat([F.gelu(r @ a) @ b for r, a, b in zip(rows, self.w_in, self.w_out)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        done = done[order].view(-1, CHOSEN, shape[-1])
        return torch.einsum("nkd,nk->nd", done, weight).view(shape)


def router(model, x):
    weight, expert = model.route(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, expert, weight)


subject = Subject(
    kind="feed_forward",
    name="sorted experts",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True},
)

WHAT = 'The outputs of the experts are put back with the sorting permutation instead of its inverse: as soon as the order is no involution, tokens get outputs of other tokens (line 32).'
