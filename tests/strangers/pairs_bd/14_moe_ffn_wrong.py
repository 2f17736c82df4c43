WHAT = "an expert's share is assigned, not added: of the two experts of a token only the one with the higher index counts (line 42)"
"""A sparse feed-forward layer: four SwiGLU experts, each token goes to two of them (as Mixtral)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(num_experts)])

    def route(self, flat):
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            given = expert(flat[token]) * weights[token, slot, None]
            out[token] = given.to(out.dtype)
        return out.view_as(x)


def router(model, x):
    weights, chosen = model.route(x.reshape(-1, x.shape[-1]))
    full = torch.zeros(weights.shape[0], model.num_experts, dtype=weights.dtype).scatter(-1, chosen, weights)
    return full.view(*x.shape[:-1], -1)


subject = Subject(
    kind="feed_forward",
    name="sparse mixture of experts",
    build=lambda c: SparseMoe(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "activation": "swiglu", "bias": False, "structure": "other"},
)
