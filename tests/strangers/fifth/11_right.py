"""Experts in stacked tensors, einsum all the way; gates are the softmax over all experts, the best two are kept as they are."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


@dataclass
class MoEConfig:
    width: int
    hidden: int
    experts: int = 4
    active: int = 2


class StackedExperts(nn.Module):
    def __init__(self, cfg: MoEConfig) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(cfg.experts, cfg.width, cfg.hidden))
        self.w_out = nn.Parameter(torch.empty(cfg.experts, cfg.hidden, cfg.width))

    def reset_parameters(self) -> None:
        for e in range(self.w_in.shape[0]):
            nn.init.xavier_uniform_(self.w_in[e])
            nn.init.xavier_uniform_(self.w_out[e])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("btd,edf->btef", x, self.w_in).relu()
        return torch.einsum("btef,efd->bted", hidden, self.w_out)


class MoE(nn.Module):
    def __init__(self, cfg: MoEConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.width, cfg.experts, bias=False)
        self.experts = StackedExperts(cfg)
        nn.init.xavier_uniform_(self.gate.weight)
        self.experts.reset_parameters()

    def route(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        chosen = probs.topk(self.cfg.active, dim=-1).indices
        keep = torch.zeros_like(probs).scatter(-1, chosen, 1.0)
        return probs * keep

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bte,bted->btd", self.route(x), self.experts(x))


subject = Subject(
    kind="feed_forward",
    name="stacked experts",
    build=lambda c: MoE(MoEConfig(c.d_model, c.d_ff)),
    forward=lambda m, x: m(x),
    router=lambda m, x: m.route(x),
    declares={
        "norm_topk_prob": False,
        "batch_coupled": False,
        "activation": "relu",
        "bias": False,
        "init": "xavier",
        "structure": "other",
    },
)
