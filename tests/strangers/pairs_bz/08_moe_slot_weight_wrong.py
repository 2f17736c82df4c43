WHAT = "Every chosen expert is multiplied with the weight of the first slot, so the second one counts as much as the best and the weights sum to more than 1 (line 43)"
"""Mixtral-like mixture of experts: top 2 of 4, weights renormalised over those chosen."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False), nn.Linear(d, f, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, d, f, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(d, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d, f) for _ in range(num_experts)])

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        weights, chosen = torch.topk(probs, self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def dense_weights(self, x):
        weights, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device).scatter(
            -1, chosen, weights
        )

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out.index_add_(0, token, weights[token, 0, None] * expert(x[token]))
        return out.view_as(hidden_states)


subject = Subject(
    kind="feed_forward",
    name="sparse moe",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_weights(x),
    declares={"norm_topk_prob": True, "bias": False},
)
