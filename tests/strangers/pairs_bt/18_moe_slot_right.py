"""Mixture of experts in the manner of Mixtral: the best two of four, weights normalised over the two."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d, d_ff):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, d_ff, bias=False), nn.Linear(d_ff, d, bias=False), nn.Linear(d, d_ff, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, d, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(d, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d, d_ff) for _ in range(num_experts)])
        self.top_k = top_k

    def route(self, x):
        probabilities = self.gate(x).softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel():
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out.view_as(hidden)


def router(model, x):
    weights, chosen = model.route(x)
    return torch.zeros(*x.shape[:-1], len(model.experts), dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="sparse mixture of experts",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "activation": "swiglu", "bias": False, "structure": "other"},
)
