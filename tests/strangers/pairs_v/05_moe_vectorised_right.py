"""Mixture of experts whose loop over tokens is gone: tokens are sorted by expert, each expert runs once."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class Expert(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate, self.up = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SparseExperts(nn.Module):
    """Every token goes to `chosen` of the experts; no token is dropped."""

    def __init__(self, d_model, d_ff, experts=4, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(d_model, experts, bias=False)
        self.experts = nn.ModuleList(Expert(d_model, d_ff) for _ in range(experts))

    def route(self, flat):
        """Weights [N, chosen], which sum to 1, and the experts that they belong to."""
        shares, experts = self.router(flat).softmax(dim=-1).topk(self.chosen, dim=-1)
        return shares / shares.sum(dim=-1, keepdim=True), experts

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        shares, experts = self.route(flat)
        order = experts.flatten().argsort(stable=True)
        token = order // self.chosen
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        pieces = flat[token].split(counts)
        computed = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        weighted = computed * shares.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, token, weighted).view_as(x)


def router(model, x):
    shares, experts = model.route(x)
    return x.new_zeros(*x.shape[:-1], len(model.experts)).scatter(-1, experts, shares)


subject = Subject(
    kind="feed_forward",
    name="sparse experts",
    build=lambda c: SparseExperts(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "bias": False},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randn(1, 4, 8)).shape)
