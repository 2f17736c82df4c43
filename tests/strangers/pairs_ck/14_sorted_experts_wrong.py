"""Mixture of experts: tokens are sorted by expert, so that each expert multiplies one contiguous block."""
import torch
from torch import nn

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, dim, hidden, experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim)) for _ in range(experts)
        )

    def route(self, flat):
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        blocks = flat[order // self.top_k].split(counts)
        done = torch.cat([expert(block) for expert, block in zip(self.experts, blocks)])
        done = done[order]
        return (done.view(len(flat), self.top_k, -1) * weights[..., None]).sum(1).view_as(x)

    def mixing(self, x):
        weights, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mixing(x),
    declares={"norm_topk_prob": True},
)

WHAT = 'Line 28: the results are put back by the permutation that sorted them, not by its inverse: tokens get results of other tokens (one token with two experts comes out right).'
