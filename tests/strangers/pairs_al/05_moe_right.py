import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class SparseMoE(nn.Module):
    def __init__(self, d_model, d_ff, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)) for _ in range(num_experts)
        )

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        top, index = probs.topk(self.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, index, top)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights = self.route(flat)
        final = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (weights[:, e] > 0).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            current = expert(flat[rows]) * weights[rows, e, None]
            final = final.index_add(0, rows, current)
        return final.view_as(hidden_states)


subject = Subject(
    kind="feed_forward", name="moe", build=lambda c: SparseMoE(c.d_model, c.d_ff), forward=lambda m, x: m(x),
    router=lambda m, x: m.route(x), declares={"norm_topk_prob": True, "structure": "other"},
)
