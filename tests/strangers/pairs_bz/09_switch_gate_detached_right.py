"""Switch feed-forward: one expert a token, scaled by the probability of its router."""
import torch
from torch import nn

from veriformer.properties import Subject


class SwitchFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts=3):
        super().__init__()
        self.router = nn.Linear(d_model, n_experts)
        self.up = nn.Parameter(torch.randn(n_experts, d_model, d_ff) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(n_experts, d_ff, d_model) * d_ff**-0.5)

    def probabilities(self, x):
        return self.router(x).softmax(dim=-1)

    def mixing(self, x):
        p = self.probabilities(x)
        best = p.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(p).scatter(-1, best, p.gather(-1, best))

    def forward(self, x):
        flat = x.flatten(0, -2)
        gate, expert = self.probabilities(flat).max(dim=-1)
        y = torch.empty_like(flat)
        for e in range(self.up.shape[0]):
            rows = (expert == e).nonzero().squeeze(1)
            y = y.index_copy(0, rows, torch.relu(flat[rows] @ self.up[e]) @ self.down[e])
        return (gate.unsqueeze(-1) * y).view(x.shape)


subject = Subject(
    kind="feed_forward",
    name="switch",
    build=lambda c: SwitchFFN(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.mixing(x),
    declares={"norm_topk_prob": False},
)
