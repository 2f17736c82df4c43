WHAT = "expert outputs stand in sorted order, but are multiplied by the routing weights in token order (not permuted by order) (line 37)."
"""Mixture of experts by sorting: tokens are permuted so that every expert gets one contiguous GEMM."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, hidden, inner, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(num_experts, hidden, inner) * hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, inner, hidden) * inner**-0.5)

    def route(self, tokens):
        probs = self.gate(tokens).softmax(dim=-1)
        weights, experts = probs.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, experts = self.route(tokens)

        flat_experts = experts.flatten()
        order = flat_experts.argsort(stable=True)
        source = order // self.top_k
        counts = flat_experts.bincount(minlength=self.num_experts).tolist()

        permuted = tokens[source]
        results = []
        for e, rows in enumerate(permuted.split(counts)):
            results.append(F.silu(rows @ self.w_in[e]) @ self.w_out[e])
        expert_out = torch.cat(results) * weights.flatten().unsqueeze(-1)

        out = torch.zeros_like(tokens).index_add(0, source, expert_out)
        return out.view_as(x)


def router(m, x):
    weights, experts = m.route(x)
    return torch.zeros(*x.shape[:-1], m.num_experts, dtype=x.dtype, device=x.device).scatter(-1, experts, weights)


subject = Subject(
    kind="feed_forward",
    name="MoE by sorting",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "bias": False},
)
