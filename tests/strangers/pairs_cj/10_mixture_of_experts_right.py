"""Sparse mixture of SwiGLU experts, top 2 of 4 with renormalised weights (Mixtral), dispatched expert by expert."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1, self.w3 = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_model, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(d_model, d_ff) for _ in range(num_experts))

    def route(self, tokens):
        probability = self.gate(tokens).softmax(dim=-1)
        weight, chosen = probability.topk(self.top_k, dim=-1)
        return weight / weight.sum(dim=-1, keepdim=True), chosen

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            made = expert(tokens[row]) * weight[row, slot, None]
            out.index_add_(0, row, made.to(out.dtype))
        return out.reshape(x.shape)


def router(model, x):
    weight, chosen = model.route(x)
    return torch.zeros_like(model.gate(x)).scatter(-1, chosen, weight)


subject = Subject(
    kind="feed_forward",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "structure": "other"},
)
