"""The sparse feed-forward of a Qwen3-MoE layer: softmax router, top-2 of 4 experts, weights that sum to one."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Experts(nn.Module):
    """All experts in two stacked tensors, as grouped matrix products want them."""

    def __init__(self, num_experts, d_model, d_ff):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * d_ff, d_model))
        self.down_proj = nn.Parameter(torch.empty(num_experts, d_model, d_ff))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x, gates):
        """x [N, D], gates [N, E] with zeros for experts that were not chosen."""
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            rows = gates[:, e].nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            gate, up = F.linear(x[rows], self.gate_up_proj[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[e])
            out = out.index_add(0, rows, y * gates[rows, e].unsqueeze(-1))
        return out


class Router(nn.Module):
    def __init__(self, d_model, num_experts, top_k, norm_topk_prob=True):
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)

    def forward(self, x):
        logits = F.linear(x, self.weight)
        wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
        probs = logits.softmax(dim=-1, dtype=wide)
        values, chosen = probs.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            values = values / values.sum(dim=-1, keepdim=True)
        gates = torch.zeros_like(probs).scatter(-1, chosen, values)
        return gates.to(x.dtype)


class SparseMLP(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.router = Router(d_model, num_experts, top_k)
        self.experts = Experts(num_experts, d_model, d_ff)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        return self.experts(flat, self.router(flat)).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="qwen3 moe",
    build=lambda c: SparseMLP(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=lambda model, x: model.router(x),
    declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "batch_coupled": False},
)
