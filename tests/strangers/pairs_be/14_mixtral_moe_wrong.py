WHAT = "what an expert gives is written over, not added to, what other experts gave for the same token (= for +=): only the chosen expert with the higher index counts: line 44."
"""Mixtral's sparse feed-forward block: two of four SwiGLU experts for each token."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MixtralExpert(nn.Module):
    def __init__(self, hidden_dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(hidden_dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(hidden_dim, ffn_dim, bias=False)

    def forward(self, hidden_states):
        return self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states))


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self, hidden_dim, ffn_dim, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_dim, num_experts, bias=False)
        self.experts = nn.ModuleList([MixtralExpert(hidden_dim, ffn_dim) for _ in range(num_experts)])

    def route(self, flat):
        routing_weights = F.softmax(self.gate(flat), dim=1)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        return routing_weights, selected_experts

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing_weights, selected_experts = self.route(flat)
        final_hidden_states = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(selected_experts == index)
            if rows.numel() == 0:
                continue
            current = expert(flat[rows]) * routing_weights[rows, slot, None]
            final_hidden_states[rows] = current
        return final_hidden_states.view_as(hidden_states)


def router(model, x):
    weights, chosen = model.route(x.reshape(-1, x.shape[-1]))
    dense = torch.zeros(len(weights), model.num_experts, dtype=weights.dtype, device=x.device)
    return dense.scatter(1, chosen, weights).view(*x.shape[:2], model.num_experts)


subject = Subject(
    kind="feed_forward",
    name="mixtral experts",
    build=lambda c: MixtralSparseMoeBlock(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
