WHAT = "every chosen expert is mixed with the weight of the token's first choice (`weights[token, 0]`) instead of with that of its own slot"
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SparseMoE(nn.Module):
    def __init__(self, dim, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(num_experts)
        )

    def route(self, flat):
        probabilities = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def dense_weights(self, x):
        weights, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            out = out.index_add(0, token, weights[token, 0, None] * expert(flat[token]))
        return out.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="mixture of experts",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.dense_weights(x),
    declares={"activation": "gelu", "bias": True, "norm_topk_prob": True, "structure": "other"},
)
