"""DeepSeek-V3's mixture: sigmoid scores, a bias that balances the load by choosing, one shared expert."""
import torch
from torch import nn
from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class SigmoidMoE(nn.Module):
    def __init__(self, d, f, n_experts=6, per_token=2):
        super().__init__()
        self.per_token = per_token
        self.centroids = nn.Linear(d, n_experts, bias=False)
        # Raised for experts that get too few tokens, lowered for others; no gradient. As it stands after some steps:
        self.register_buffer("balance", torch.linspace(-0.25, 0.25, n_experts))
        self.experts = nn.ModuleList(Expert(d, f) for _ in range(n_experts))
        self.shared = Expert(d, f)

    def route(self, x):
        scores = self.centroids(x).sigmoid()
        biased = scores + self.balance.to(scores.dtype)
        picked = biased.topk(self.per_token, dim=-1).indices
        gates = biased.gather(-1, picked)
        gates = gates / gates.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, picked, gates)

    def forward(self, x):
        routed = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.shared(x) + (routed * self.route(x).unsqueeze(-2)).sum(-1)


subject = Subject(
    kind="feed_forward",
    name="sigmoid mixture of experts",
    build=lambda c: SigmoidMoE(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.route(x),
    declares={"norm_topk_prob": True, "activation": "other", "structure": "other"},
)

WHAT = (
    'Line 30: the gates are taken from the biased scores; the balancing bias is to decide which experts are chosen, not how much they weigh.'
)
