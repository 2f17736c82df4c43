WHAT = "The experts' outputs are in the order sorted by expert, the mixing weights in the order of tokens: the weights are not permuted by `order`, so that a token's experts are weighted with weights of other tokens (line 40: `y = y * weights.flatten().unsqueeze(-1)`)."
"""Mixture of experts without a loop over tokens: pairs (token, expert) are sorted by expert, each expert gets one slice."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(EXPERTS)])

    def route(self, x):
        """Weights and indices [N, TOP_K] of the chosen experts; the weights of a token sum to 1."""
        weights, chosen = self.gate(x).softmax(-1).topk(TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        expert, order = chosen.flatten().sort(stable=True)
        token = order // TOP_K
        counts = torch.bincount(expert, minlength=EXPERTS).tolist()
        slices = flat[token].split(counts)
        y = torch.cat([e(piece) for e, piece in zip(self.experts, slices)])
        y = y * weights.flatten().unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, y).view_as(x)

    def mixing(self, x):
        weights, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="sorted mixture of experts",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mixing(x),
    declares={"norm_topk_prob": True},
)
