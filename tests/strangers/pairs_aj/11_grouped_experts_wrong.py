WHAT = "Every token stands top_k times in the index and an assignment by index does not accumulate: of the chosen experts only the last one's share remains; line 47: `out[token] = out[token] + mixed`."
"""Mixture of experts: the (token, choice) pairs are sorted by expert, each expert runs once on its slice."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

NUM_EXPERTS = 4
TOP_K = 2


class Experts(nn.Module):
    def __init__(self, dim, hidden, num_experts=NUM_EXPERTS, top_k=TOP_K):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(num_experts, 2 * hidden, dim) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, dim, hidden) * hidden**-0.5)

    def route(self, flat):
        probs = self.gate(flat).softmax(dim=-1)
        weight, expert = probs.topk(self.top_k, dim=-1)
        return weight / weight.sum(dim=-1, keepdim=True), expert

    def router_weights(self, x):
        weight, expert = self.route(x.flatten(0, 1))
        dense = weight.new_zeros(weight.size(0), self.num_experts).scatter(1, expert, weight)
        return dense.view(*x.shape[:2], self.num_experts)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, expert = self.route(flat)

        order = expert.flatten().argsort(stable=True)
        token = order // self.top_k
        sizes = torch.bincount(expert.flatten(), minlength=self.num_experts).tolist()

        slices = []
        for e, rows in enumerate(flat[token].split(sizes)):
            gate, up = F.linear(rows, self.w_in[e]).chunk(2, dim=-1)
            slices.append(F.linear(F.silu(gate) * up, self.w_out[e]))
        mixed = torch.cat(slices) * weight.flatten()[order].unsqueeze(-1)

        out = torch.zeros_like(flat)
        out[token] = out[token] + mixed
        return out.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="grouped experts",
    build=lambda c: Experts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router_weights(x),
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
)
