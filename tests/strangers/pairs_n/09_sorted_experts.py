"""A mixture of experts without a loop over tokens: the (token, choice) pairs are sorted by expert, every expert gets one
contiguous slice, and what comes back is scattered onto the tokens. Top 2 of 4 experts, weights that sum to one."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = "The routing weights are multiplied in the order of the tokens onto expert outputs that stand in the order of the experts."
CAUSE = (
    "After the sort by expert the routing weights are not permuted along (weights.view(-1) instead of "
    "weights.view(-1)[order]), so each expert's output is weighted by the gate of some other token or choice."
)

EXPERTS, TOP_K = 4, 2


class Router(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)

    def forward(self, flat):
        probabilities = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = probabilities.topk(TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """Two matrices an expert, kept in two big parameters."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, dim) * hidden**-0.5)

    def forward(self, rows, owners):
        """Rows sorted by owner; each goes through the expert that owns it."""
        sizes = torch.bincount(owners, minlength=EXPERTS).tolist()
        slices = rows.split(sizes)
        return torch.cat([F.silu(part @ up) @ down for part, up, down in zip(slices, self.up, self.down)])


class SparseMLP(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.router = Router(dim)
        self.experts = Experts(dim, hidden)

    def gates(self, weights, order):
        return weights.reshape(-1)[order]

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat)
        owners, order = chosen.reshape(-1).sort(stable=True)
        tokens = order // TOP_K
        rows = self.experts(flat[tokens], owners) * self.gates(weights, order)[:, None]
        return torch.zeros_like(flat).index_add(0, tokens, rows.to(flat.dtype)).reshape(x.shape)


class SparseMLPUnsorted(SparseMLP):
    def gates(self, weights, order):
        return weights.reshape(-1)


def routing(model, x):
    weights, chosen = model.router(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=weights.dtype, device=x.device).scatter(-1, chosen, weights)


def subject(cls, name):
    return Subject(
        kind="feed_forward",
        name=name,
        build=lambda c: cls(c.d_model, c.d_ff),
        forward=lambda m, x: m(x),
        router=routing,
        declares={"norm_topk_prob": True, "structure": "other", "bias": False},
    )


right = subject(SparseMLP, "sparse MLP")
wrong = subject(SparseMLPUnsorted, "sparse MLP, unsorted gates")
