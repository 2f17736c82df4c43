WHAT = "Token copies are sorted by expert before dispatch, but the gates they are multiplied by stay in the order of the tokens (`gates.flatten()` without `[order]`), so an expert's output is weighted by another token's gate."
"""Mixture of experts: token copies sorted by expert, one matrix product an expert, scattered back (MegaBlocks style)."""

import torch
from torch import nn

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class MoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=EXPERTS, top_k=TOP_K):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(num_experts)
        )

    def route(self, flat):
        probs = self.gate(flat).softmax(-1)
        gates, chosen = probs.topk(self.top_k, dim=-1)
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gates, chosen = self.route(flat)

        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()

        groups = flat[token].split(counts)
        out = torch.cat([expert(group) for expert, group in zip(self.experts, groups)])
        out = out * gates.flatten().unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, out).view_as(x)

    def router_weights(self, x):
        gates, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype, device=x.device).scatter(-1, chosen, gates)


subject = Subject(
    kind="feed_forward",
    name="sorted mixture of experts",
    build=lambda c: MoE(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=lambda model, x: model.router_weights(x),
    declares={"activation": "gelu", "norm_topk_prob": True, "structure": "other"},
)
