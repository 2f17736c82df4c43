WHAT = "each expert's share is assigned, not added: of a token's two experts only the one of the higher index counts (line 45)."
"""The sparse feed-forward network of a Mixtral: each token goes to two of four experts."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class Expert(nn.Module):
    def __init__(self, hidden_dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(hidden_dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(hidden_dim, ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoeBlock(nn.Module):
    def __init__(self, hidden_dim, ffn_dim):
        super().__init__()
        self.gate = nn.Linear(hidden_dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(hidden_dim, ffn_dim) for _ in range(EXPERTS)])

    def route(self, flat):
        probs = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = torch.topk(probs, TOP_K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, hidden_states):
        shape = hidden_states.shape
        flat = hidden_states.reshape(-1, shape[-1])
        weights, chosen = self.route(flat)
        final = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            current = expert(flat[token]) * weights[token, slot, None]
            final[token] = current
        return final.view(shape)

    def router(self, hidden_states):
        weights, chosen = self.route(hidden_states)
        full = weights.new_zeros(*hidden_states.shape[:-1], EXPERTS)
        return full.scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="sparse experts",
    build=lambda c: SparseMoeBlock(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router(x),
    declares={"norm_topk_prob": True, "structure": "other", "bias": False},
)
