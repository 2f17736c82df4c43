import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SortedMoE(nn.Module):
    """Dropless: rows are sorted by expert, each expert takes its run of rows."""

    def __init__(self, d_model, d_ff, num_experts=6, top_k=2):
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(num_experts)])

    def route(self, x):
        probs = self.gate(x).softmax(dim=-1)
        weight, chosen = probs.topk(self.top_k, dim=-1)
        return weight / weight.sum(-1, keepdim=True), chosen

    def dense_router(self, x):
        weight, chosen = self.route(x)
        return weight.new_zeros(*x.shape[:-1], self.num_experts).scatter(-1, chosen, weight)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.route(flat)
        expert_of_slot, order = chosen.flatten().sort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(expert_of_slot, minlength=self.num_experts)
        runs = flat[token].split(counts.tolist())
        done = torch.cat([expert(run) for expert, run in zip(self.experts, runs)])
        done = done * weight.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, token, done).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted experts",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_router(x),
    declares={"activation": "gelu", "norm_topk_prob": True, "structure": "other"},
)
