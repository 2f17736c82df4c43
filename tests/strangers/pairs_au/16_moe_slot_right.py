import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, n_embd, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, hidden), nn.GELU(), nn.Linear(hidden, n_embd))

    def forward(self, x):
        return self.net(x)


class SparseMoE(nn.Module):
    """Mixtral style: each token goes to its two best experts, whose weights are made to sum to 1."""

    def __init__(self, n_embd, hidden, num_experts=4, top_k=2):
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.gate = nn.Linear(n_embd, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(n_embd, hidden) for _ in range(num_experts)])

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        weights, selected = torch.topk(probs, self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), selected

    def router(self, x):
        weights, selected = self.route(x)
        return torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype, device=x.device).scatter(-1, selected, weights)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, selected = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(selected == e)
            if token.numel() == 0:
                continue
            out = out.index_add(0, token, weights[token, slot, None] * expert(flat[token]))
        return out.view_as(x)


subject = Subject(
    kind="feed_forward",
    name="SparseMoE",
    build=lambda c: SparseMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router(x),
    declares={"norm_topk_prob": True, "activation": "gelu", "structure": "other"},
)
