"""A mixture of experts, each called on the tokens that chose it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "what an expert gives is written over what an earlier expert gave the same token, not added to it"
CAUSE = (
    "The outputs of a token's two experts are not summed: the last expert overwrites what the other one gave (an "
    "assignment instead of index_add)."
)


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
            nn.Linear(dim, hidden, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))

    def route(self, flat):
        probs = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def put(self, out, where, what):
        return out.index_add(0, where, what)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            given = expert(flat[token]) * weights[token, slot, None]
            out = self.put(out, token, given.to(out.dtype))
        return out.view(x.shape)


class SparseMixture(SparseMoe):
    def put(self, out, where, what):
        return out.index_copy(0, where, what)


def dense_weights(model, x):
    weights, chosen = model.route(x.reshape(-1, x.shape[-1]))
    full = torch.zeros(weights.shape[0], len(model.experts), dtype=weights.dtype, device=x.device)
    return full.scatter(1, chosen, weights).view(*x.shape[:2], -1)


def subject(model):
    return Subject(
        kind="feed_forward",
        name="mixture of experts",
        build=lambda c: model(c.d_model, c.d_ff),
        forward=lambda m, x: m(x),
        router=dense_weights,
        declares={"norm_topk_prob": True, "structure": "other"},
    )


right = subject(SparseMoe)
wrong = subject(SparseMixture)
