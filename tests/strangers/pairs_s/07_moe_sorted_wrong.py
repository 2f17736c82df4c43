WHAT = "behind line 29, where a line is missing: the chosen experts of a token are sorted by number and their weights are left in the old order, so that where the better expert has the larger number the two weights are swapped"
"""A sparse mixture of experts: two of four feed-forward networks for each token."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class SparseMoE(nn.Module):
    def __init__(self, hidden, inner, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden)) for _ in range(num_experts)
        )

    def route(self, x):
        """Weights and numbers of the best experts, [..., top_k] each; the weights sum to one."""
        weights, chosen = F.softmax(self.gate(x), dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = self.route(x)
        chosen, order = chosen.sort(dim=-1)  # experts in ascending order: neighbours in memory
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, slot = torch.where(chosen == number)
            y = self.experts[number](x[token]) * weights[token, slot, None]
            out = out.index_add(0, token, y)
        return out.reshape(shape)


def mixture_weights(model, x):
    weights, chosen = model.route(x)
    return weights.new_zeros(*x.shape[:-1], len(model.experts)).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="sparse MoE",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=mixture_weights,
    declares={"norm_topk_prob": True, "activation": "gelu"},
)
