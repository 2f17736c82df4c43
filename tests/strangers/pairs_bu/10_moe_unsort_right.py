import torch
from torch import nn

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(EXPERTS)
        )

    def route(self, x):
        probs = self.gate(x).softmax(-1)
        weights, chosen = probs.topk(TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def dense_router(self, x):
        weights, chosen = self.route(x)
        return weights.new_zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, weights)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.route(tokens)
        slots = chosen.flatten()  # slot i belongs to token i // TOP_K
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=EXPERTS).tolist()
        pieces = tokens[order // TOP_K].split(counts)
        mixed = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces)])
        mixed = mixed[order.argsort()].unflatten(0, (-1, TOP_K))
        return (mixed * weights.unsqueeze(-1)).sum(1).view_as(x)


subject = Subject(
    kind="feed_forward",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_router(x),
    declares={"activation": "gelu", "norm_topk_prob": True, "structure": "other"},
)
