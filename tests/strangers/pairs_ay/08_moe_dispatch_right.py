"""Mixture of experts; tokens are sorted by expert, so that each expert runs once."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(num_experts)])

    def route(self, tokens):
        weights, chosen = self.gate(tokens).softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, x):
        tokens = x.reshape(-1, x.size(-1))
        weights, chosen = self.route(tokens)
        flat_expert = chosen.flatten()
        flat_weight = weights.flatten()

        order = flat_expert.argsort(stable=True)
        source = order.div(self.top_k, rounding_mode="floor")
        counts = flat_expert.bincount(minlength=self.num_experts).tolist()

        batches = tokens[source].split(counts)
        done = torch.cat([expert(batch) for expert, batch in zip(self.experts, batches)])
        done = done * flat_weight[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, source, done).view_as(x)


def router(moe, x):
    weights, chosen = moe.route(x)
    return torch.zeros(*x.shape[:-1], moe.num_experts, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="mixture of experts",
    build=lambda c: SparseMoe(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "bias": False, "structure": "other"},
)
