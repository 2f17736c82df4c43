"""A mixture of experts without capacity: tokens are sorted by expert, each expert takes one slice."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SortedExperts(nn.Module):
    def __init__(self, dim, hidden, experts=4, chosen=2):
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w_gate = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w_up = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w_down = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def route(self, x):
        probs = self.gate(x).softmax(-1)
        weight, index = probs.topk(self.chosen, dim=-1)
        return weight / weight.sum(-1, keepdim=True), index

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, index = self.route(x)
        owner = index.flatten()  # expert of every (token, choice)
        order = owner.argsort(stable=True)
        sizes = owner.bincount(minlength=self.experts).tolist()
        rows = x.repeat_interleave(self.chosen, dim=0)[order]
        outs = []
        for e, part in enumerate(rows.split(sizes)):
            h = F.silu(part @ self.w_gate[e]) * (part @ self.w_up[e])
            outs.append(h @ self.w_down[e])
        back = order.argsort()
        y = torch.cat(outs)[back].view(-1, self.chosen, shape[-1])
        return (y * weight[..., None]).sum(1).view(shape)


def router(model, x):
    weight, index = model.route(x)
    return torch.zeros(*x.shape[:2], model.experts, dtype=weight.dtype, device=x.device).scatter(-1, index, weight)


subject = Subject(
    kind="feed_forward",
    name="sorted experts",
    build=lambda c: SortedExperts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
