"""DeepSeekMoE: one shared expert for all tokens, and the best two of four fine-grained routed ones."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, dim, inter_dim):
        super().__init__()
        self.gate_proj = nn.Linear(dim, inter_dim, bias=False)
        self.up_proj = nn.Linear(dim, inter_dim, bias=False)
        self.down_proj = nn.Linear(inter_dim, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DeepseekMoE(nn.Module):
    def __init__(self, dim, inter_dim, n_routed_experts=4, num_experts_per_tok=2):
        super().__init__()
        self.top_k = num_experts_per_tok
        self.gate = nn.Linear(dim, n_routed_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, inter_dim) for _ in range(n_routed_experts))
        self.shared_expert = Expert(dim, inter_dim)

    def route(self, x):
        probs = self.gate(x).softmax(dim=-1)
        topk_weight, topk_idx = probs.topk(self.top_k, dim=-1)
        return topk_weight / topk_weight.sum(dim=-1, keepdim=True), topk_idx

    def combine_weights(self, x):
        weight, index = self.route(x)
        return torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device).scatter(-1, index, weight)

    def forward(self, hidden_states):
        x = hidden_states.flatten(0, -2)
        topk_weight, topk_idx = self.route(x)
        routed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(topk_idx == i)
            if token.numel() == 0:
                continue
            routed.index_add_(0, token, expert(x[token]) * topk_weight[token, slot, None])
        return routed.view_as(hidden_states) + self.shared_expert(hidden_states)


subject = Subject(
    kind="feed_forward",
    name="DeepSeekMoE",
    build=lambda c: DeepseekMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.combine_weights(x),
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
