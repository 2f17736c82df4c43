WHAT = "an expert's output is assigned to its tokens instead of added to what earlier experts gave them (line 48), so that of two chosen experts only the one of the higher index counts"
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
            nn.Linear(width, inner, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoeBlock(nn.Module):
    def __init__(self, width, inner, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(num_experts))

    def route(self, x):
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def routing(self, x):
        weights, chosen = self.route(x)
        return weights.new_zeros(*x.shape[:-1], self.num_experts).scatter(-1, chosen, weights)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            given = expert(x[token]) * weights[token, slot, None]
            out = out.index_copy(0, token, given)
        return out.view_as(hidden_states)


subject = Subject(
    kind="feed_forward",
    name="mixtral block",
    build=lambda c: SparseMoeBlock(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.routing(x),
    declares={"norm_topk_prob": True, "bias": False, "structure": "other"},
)
