"""Sparse feed-forward network: top 2 of 4 experts a token, gathered and scattered with index_add_ (Mixtral style)."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class SparseMoE(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate = nn.Linear(hidden_size, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden_size, intermediate_size), nn.GELU(), nn.Linear(intermediate_size, hidden_size)
            )
            for _ in range(EXPERTS)
        )

    def route(self, flat):
        shares = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = torch.topk(shares, CHOSEN, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = self.route(flat)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            output = output.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return output.view_as(hidden_states)


def router(model, x):
    weights, chosen = model.route(x.reshape(-1, x.shape[-1]))
    full = torch.zeros(len(weights), EXPERTS, dtype=x.dtype, device=x.device)
    return full.scatter(1, chosen, weights).view(*x.shape[:-1], EXPERTS)


subject = Subject(
    kind="feed_forward",
    name="top 2 of 4 experts",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "structure": "other"},
)
