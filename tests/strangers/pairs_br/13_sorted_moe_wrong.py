WHAT = "tokens are sorted by expert but the routing weights are not: each expert's output is multiplied by the weight of another token or slot (line 40)"
"""Mixture of experts, dropless: tokens are sorted by expert, each expert gets one slice (MegaBlocks-like)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) / hidden**0.5)

    def route(self, tokens):
        probs = F.softmax(self.gate(tokens), dim=-1)
        weights, experts = probs.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts

    def router(self, x):
        weights, experts = self.route(x)
        return torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype, device=x.device).scatter(-1, experts, weights)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = self.route(tokens)

        flat = experts.flatten()
        order = flat.argsort(stable=True)
        owner = order // self.top_k
        counts = torch.bincount(flat, minlength=self.num_experts).tolist()

        permuted = tokens[owner]
        pieces = []
        for e, piece in enumerate(permuted.split(counts)):
            pieces.append(F.gelu(piece @ self.w1[e]) @ self.w2[e])
        permuted = torch.cat(pieces) * weights.flatten().unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, owner, permuted).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="sorted MoE",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router(x),
    declares={"norm_topk_prob": True, "bias": False, "structure": "other"},
)
