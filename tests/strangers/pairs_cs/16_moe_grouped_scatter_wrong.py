"""A mixture of experts with grouped products: (token, expert) pairs are sorted by expert, run group by group, put back."""
import torch
from torch import nn

from veriformer.properties import Subject


class SparseMoE(nn.Module):
    def __init__(self, width, hidden, experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)) for _ in range(experts)]
        )

    def route(self, flat):
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def router_weights(self, x):
        weights, chosen = self.route(x.reshape(-1, x.shape[-1]))
        dense = weights.new_zeros(len(weights), len(self.experts)).scatter(-1, chosen, weights)
        return dense.view(*x.shape[:-1], -1)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        groups = flat[token].split(sizes)
        ran = torch.cat([expert(group) for expert, group in zip(self.experts, groups)])
        ran = (ran * weights.flatten()[order][:, None]).to(x.dtype)
        out = torch.zeros_like(flat)
        out[token] += ran
        return out.view(x.shape)


subject = Subject(
    kind="feed_forward",
    name="sparse mixture of experts",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router_weights(x),
    declares={"norm_topk_prob": True},
)

WHAT = (
    'The outputs of the experts are added by an indexed assignment (line 36), which keeps one of several equal indices: every token gets one of its two experts alone.'
)
