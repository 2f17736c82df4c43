WHAT = "The slots are sorted by expert before the experts run, but the gate's weights are left in the unsorted order (line 45): what an expert gives is multiplied by the weight of another slot, often of another token."
# Mixture of SwiGLU experts (Mixtral), dropless: slots are sorted by expert, each expert runs once.
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(num_experts)])

    def route(self, flat):
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def router_weights(self, x):
        weights, chosen = self.route(x.flatten(0, -2))
        dense = weights.new_zeros(weights.shape[0], len(self.experts)).scatter(1, chosen, weights)
        return dense.view(*x.shape[:-1], -1)

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, chosen = self.route(flat)
        slots = chosen.reshape(-1)
        order = slots.argsort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(slots, minlength=len(self.experts)).tolist()
        parts = [expert(part) for expert, part in zip(self.experts, flat[token].split(counts))]
        gate = weights.reshape(-1)
        mixed = torch.cat(parts) * gate.unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, mixed).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted MoE",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router_weights(x),
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
