WHAT = "Outputs of the experts, sorted by expert, are put back with the sorting permutation itself instead of its inverse: tokens get the outputs of other tokens (line 38: `scattered = expert_out[order]`)."
"""A dropless mixture of experts: tokens are sorted by expert, each expert runs once, the rest is un-sorting."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SortedMoE(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(num_experts, d_model, d_ff) * d_model**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, d_ff, d_model) * d_ff**-0.5)

    def route(self, tokens):
        probs = F.softmax(self.gate(tokens), dim=-1)
        weights, chosen = torch.topk(probs, self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)

        flat = chosen.flatten()  # [N * k], slot by slot of each token
        order = torch.argsort(flat, stable=True)
        sizes = torch.bincount(flat, minlength=self.num_experts).tolist()

        gathered = tokens[order // self.top_k]
        expert_out = []
        for e, part in enumerate(gathered.split(sizes)):
            expert_out.append(torch.relu(part @ self.w_in[e]) @ self.w_out[e])
        expert_out = torch.cat(expert_out)

        scattered = expert_out[order]
        y = (scattered.view(-1, self.top_k, x.shape[-1]) * weights.unsqueeze(-1)).sum(dim=1)
        return y.view_as(x)


def router(model, x):
    weights, chosen = model.route(x)
    return torch.zeros(*x.shape[:-1], model.num_experts, dtype=weights.dtype).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="sorted mixture of experts",
    build=lambda c: SortedMoE(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"activation": "relu", "bias": False, "norm_topk_prob": True},
)
