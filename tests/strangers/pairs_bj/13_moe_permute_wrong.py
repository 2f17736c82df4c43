WHAT = "Results are put back with the sorting permutation itself instead of its inverse (`worked[order]`, line 38): tokens receive what the experts made of other tokens."
"""Dropless mixture of experts: tokens are sorted by expert, worked on in runs, and put back."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * d_model**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, d_ff, d_model) * d_ff**-0.5)

    def route(self, tokens):
        probs = F.softmax(self.gate(tokens), dim=-1)
        weights, chosen = torch.topk(probs, self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)

        # permute: copies of the tokens, those of one expert next to one another
        order = torch.argsort(chosen.flatten(), stable=True)
        permuted = tokens[order // self.top_k]
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()

        runs = permuted.split(counts)
        worked = torch.cat([F.gelu(run @ self.w1[e]) @ self.w2[e] for e, run in enumerate(runs)])

        # unpermute
        copies = worked[order].view(-1, self.top_k, x.shape[-1])
        return (copies * weights.unsqueeze(-1)).sum(1).view_as(x)


def router(model, x):
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = model.route(tokens)
    dense = weights.new_zeros(tokens.shape[0], model.num_experts).scatter(1, chosen, weights)
    return dense.view(*x.shape[:-1], model.num_experts)


subject = Subject(
    kind="feed_forward",
    name="sorted MoE",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"norm_topk_prob": True, "structure": "other", "bias": False},
)
