import torch
import torch.nn as nn

from veriformer.properties import Subject


class SparseMoe(nn.Module):
    def __init__(self, d, ff, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(d, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d)) for _ in range(num_experts))

    def route(self, flat):
        probs = self.gate(flat).softmax(dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.size(-1))
        weights, chosen = self.route(flat)
        final = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            final.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return final.view_as(hidden_states)

    def router_weights(self, hidden_states):
        weights, chosen = self.route(hidden_states)
        return torch.zeros(*hidden_states.shape[:-1], len(self.experts), dtype=weights.dtype).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    build=lambda c: SparseMoe(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.router_weights(x),
    declares={"activation": "gelu", "norm_topk_prob": True, "structure": "other"},
)
