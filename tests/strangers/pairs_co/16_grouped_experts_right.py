"""Experts by grouped products: tokens are sorted by expert, each expert takes one slice, and the rows go back to their places."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP = 4, 2


class Experts(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, width) * hidden**-0.5)

    def route(self, rows):
        score, chosen = self.gate(rows).softmax(-1).topk(TOP, dim=-1)
        return score / score.sum(-1, keepdim=True), chosen

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.route(rows)
        expert = chosen.reshape(-1)
        order = expert.argsort(stable=True)
        sizes = torch.bincount(expert, minlength=EXPERTS).tolist()
        slices = rows[order // TOP].split(sizes)
        done = torch.cat([F.gelu(s @ up) @ down for s, up, down in zip(slices, self.up, self.down)])
        done = done[order.argsort()].reshape(-1, TOP, x.shape[-1])
        return (done * share[..., None]).sum(1).reshape(x.shape).to(x.dtype)


def router(model, x):
    share, chosen = model.route(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=share.dtype, device=x.device).scatter(-1, chosen, share)


subject = Subject(
    kind="feed_forward",
    name="grouped experts",
    build=lambda c: Experts(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "structure": "other", "bias": False},
)
