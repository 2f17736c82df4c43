"""Mixture of experts with grouped dispatch: tokens sorted by expert, one product each."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate = nn.Linear(c.d_model, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, c.d_model, c.d_ff) / c.d_model**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, c.d_ff, c.d_model) / c.d_ff**0.5)

    def route(self, flat):
        top, experts = self.gate(flat).softmax(-1).topk(CHOSEN, -1)
        return top / top.sum(-1, keepdim=True), experts

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gates, experts = self.route(flat)
        chosen = experts.reshape(-1)
        order = chosen.argsort(stable=True)
        token = order // CHOSEN
        counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
        results = [
            F.gelu(rows @ self.up[e]) @ self.down[e] for e, rows in enumerate(flat[token].split(counts))
        ]
        weighted = torch.cat(results) * gates.reshape(-1, 1)[order]
        return torch.zeros_like(flat).index_add(0, token, weighted).view_as(x)


def router(model, x):
    gates, experts = model.route(x.reshape(-1, x.shape[-1]))
    full = torch.zeros(gates.shape[0], EXPERTS, dtype=gates.dtype).scatter(1, experts, gates)
    return full.view(*x.shape[:-1], EXPERTS)


subject = Subject(
    kind="feed_forward",
    name="grouped experts",
    build=MoE,
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "bias": False, "structure": "other"},
)
