"""Sparse experts without loops over slots: pairs (token, expert) are sorted by expert, each expert sees one slice."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class SortedExperts(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(EXPERTS)]
        )

    def route(self, x):
        p = self.gate(x).softmax(-1)
        share, expert = p.topk(CHOSEN, dim=-1)
        return share / share.sum(-1, keepdim=True), expert

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        share, expert = self.route(flat)
        order = expert.flatten().argsort(stable=True)
        token = order // CHOSEN
        counts = torch.bincount(expert.flatten(), minlength=EXPERTS).tolist()
        slices = flat[token].split(counts)
        y = torch.cat([f(part) for f, part in zip(self.experts, slices)])
        y = y * share.flatten()[:, None]
        return torch.zeros_like(flat).index_add(0, token, y).view_as(x)


def router(model, x):
    share, expert = model.route(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, expert, share)


subject = Subject(
    kind="feed_forward",
    name="sorted experts",
    build=lambda c: SortedExperts(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True},
)

WHAT = "The shares are not brought into the sorted order of the pairs (line 33): each expert's output is multiplied by the share of another token or slot."
