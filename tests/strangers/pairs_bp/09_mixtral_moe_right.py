import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MixtralSparseMoe(nn.Module):
    """Top-2 of 4 experts; the experts' weights stand stacked, as for a grouped matrix product."""

    def __init__(self, hidden, inner, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, inner, hidden) / hidden**0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, inner, hidden) / hidden**0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, inner) / inner**0.5)

    def route(self, tokens):
        probabilities = self.gate(tokens).softmax(dim=-1)
        weights, selected = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), selected

    def mixture(self, x):
        weights, selected = self.route(x)
        return torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype, device=x.device).scatter(-1, selected, weights)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, selected = self.route(tokens)
        # ascending expert ids: a token's rows lie in the order in which the experts are walked
        selected, order = selected.sort(dim=-1)
        weights = weights.gather(-1, order)
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, slot = torch.where(selected == expert)
            if row.numel() == 0:
                continue
            h = tokens[row]
            h = F.silu(h @ self.w1[expert].T) * (h @ self.w3[expert].T)
            out = out.index_add(0, row, (h @ self.w2[expert].T) * weights[row, slot, None])
        return out.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="Mixtral sparse MoE",
    build=lambda c: MixtralSparseMoe(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mixture(x),
    declares={"activation": "swiglu", "norm_topk_prob": True, "bias": False},
)
