WHAT = "the experts' outputs are put back by the sorting order itself instead of its inverse: tokens get one another's expert outputs (line 33)."
"""A dropless mixture of experts: assignments are sorted by expert, each expert takes its slice, and the order is restored."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class DroplessMoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, dim) * dim**-0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden) * hidden**-0.5)

    def route(self, flat):
        probs = self.gate(flat).softmax(-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        weights, chosen = self.route(flat)
        order = torch.argsort(chosen.flatten(), stable=True)  # slot n * top_k + j holds choice j of token n
        sizes = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()
        done = []
        for e, part in enumerate(flat[order // self.top_k].split(sizes)):
            done.append((F.silu(part @ self.w1[e].T) * (part @ self.w3[e].T)) @ self.w2[e].T)
        done = torch.cat(done)
        restored = done[order]
        mixed = (restored.view(-1, self.top_k, x.size(-1)) * weights.unsqueeze(-1)).sum(1)
        return mixed.view_as(x)


def router(model, x):
    weights, chosen = model.route(x.reshape(-1, x.size(-1)))
    dense = torch.zeros(len(weights), model.num_experts, dtype=weights.dtype, device=x.device)
    return dense.scatter(1, chosen, weights).view(*x.shape[:-1], -1)


subject = Subject(
    kind="feed_forward",
    name="dropless mixture",
    build=lambda c: DroplessMoE(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "bias": False, "structure": "other"},
)
