"""Feed-forward of a ranking model: two of four experts a token, tokens sorted by expert so that each runs once."""
import torch
from torch import nn

from veriformer.properties import Subject

EXPERTS, CHOSEN = 4, 2


class Experts(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim)) for _ in range(EXPERTS)
        )

    def choose(self, x):
        share, which = self.gate(x).softmax(-1).topk(CHOSEN, dim=-1)
        return share / share.sum(-1, keepdim=True), which

    def route(self, x):
        share, which = self.choose(x)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype, device=x.device).scatter(-1, which, share)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        share, which = self.choose(flat)
        slots = which.flatten()  # token 0 first choice, token 0 second choice, token 1 first choice, ...
        order = slots.argsort(stable=True)
        sizes = torch.bincount(slots, minlength=EXPERTS).tolist()
        queue = flat[order // CHOSEN].split(sizes)
        done = torch.cat([expert(batch) for expert, batch in zip(self.experts, queue)])
        back = order.argsort()
        mixed = done[back].view(-1, CHOSEN, flat.shape[-1]) * share.unsqueeze(-1)
        return mixed.sum(1).view_as(x)


subject = Subject(
    kind="feed_forward",
    name="experts of the ranker",
    build=lambda c: Experts(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.route(x),
    declares={"norm_topk_prob": True},
)
