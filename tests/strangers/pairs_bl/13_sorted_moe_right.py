"""A mixture of experts without capacity: copies of tokens are sorted by expert, so that each expert runs once."""

import torch
from torch import nn

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model)) for _ in range(num_experts)
        )

    def route(self, flat):
        probabilities = self.gate(flat).softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def dense_weights(self, x):
        weights, chosen = self.route(x.flatten(0, 1))
        dense = weights.new_zeros(weights.shape[0], self.num_experts).scatter(1, chosen, weights)
        return dense.view(*x.shape[:2], -1)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat)

        expert_of = chosen.flatten()  # copy n belongs to token n // top_k
        order = expert_of.argsort(stable=True)
        copies = flat[order // self.top_k]
        sizes = torch.bincount(expert_of, minlength=self.num_experts).tolist()
        outputs = [expert(part) for expert, part in zip(self.experts, copies.split(sizes), strict=True)]

        back = order.argsort()
        unsorted = torch.cat(outputs)[back].view(flat.shape[0], self.top_k, -1)
        return (unsorted * weights.unsqueeze(-1)).sum(dim=1).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted mixture of experts",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_weights(x),
    declares={"activation": "gelu", "bias": True, "norm_topk_prob": True, "structure": "other"},
)
