"""Mixture of experts without padding or dropping: tokens sorted by expert, one product a group, sorted back."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GroupedMoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)

    def route(self, x):
        probs = self.gate(x).softmax(dim=-1)
        weight, expert = probs.topk(self.top_k, dim=-1)
        return weight / weight.sum(dim=-1, keepdim=True), expert

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weight, expert = self.route(x)
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        grouped = x[order // self.top_k]
        sizes = flat.bincount(minlength=self.num_experts).tolist()

        done = []
        for e, rows in enumerate(grouped.split(sizes)):
            done.append(F.gelu(rows @ self.w1[e]) @ self.w2[e])
        restored = torch.cat(done)[order.argsort()]

        out = (restored.view(-1, self.top_k, shape[-1]) * weight.unsqueeze(-1)).sum(dim=1)
        return out.view(shape)


def router(model, x):
    weight, expert = model.route(x)
    return torch.zeros(*x.shape[:-1], model.num_experts, dtype=weight.dtype).scatter(-1, expert, weight)


subject = Subject(
    kind="feed_forward",
    name="grouped moe",
    build=lambda c: GroupedMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=router,
    declares={"activation": "gelu", "norm_topk_prob": True, "bias": False},
)
