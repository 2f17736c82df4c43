WHAT = "index_copy instead of index_add in the loop over experts: the second expert of a token overwrites what the first gave"
"""Sparse mixture of experts for ViT tokens: top-2 of 4, weights renormalised, one pass over the experts."""
import torch
from torch import nn

from veriformer.properties import Subject


class Experts(nn.Module):
    def __init__(self, n, d, ff):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(n, d, ff) * d**-0.5)
        self.w_out = nn.Parameter(torch.randn(n, ff, d) * ff**-0.5)

    def one(self, e, x):
        return torch.relu(x @ self.w_in[e]) @ self.w_out[e]


class SparseMoE(nn.Module):
    def __init__(self, d, ff, n_experts=4, k=2):
        super().__init__()
        self.n, self.k = n_experts, k
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.experts = Experts(n_experts, d, ff)

    def route(self, flat):
        top, chosen = self.gate(flat).softmax(-1).topk(self.k, dim=-1)
        return top / top.sum(-1, keepdim=True), chosen

    def weights(self, x):
        top, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], self.n, dtype=x.dtype, device=x.device).scatter(-1, chosen, top)

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        top, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for e in range(self.n):
            rows, slot = torch.where(chosen == e)
            if rows.numel() == 0:
                continue
            y = self.experts.one(e, flat[rows]) * top[rows, slot].unsqueeze(-1)
            out = out.index_copy(0, rows, y)
        return out.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="v-moe",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.weights(x),
    declares={"norm_topk_prob": True, "bias": False, "activation": "relu"},
)
