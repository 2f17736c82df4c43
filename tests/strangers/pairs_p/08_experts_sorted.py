"""A mixture of SwiGLU experts without a loop over choices: sort the (token, choice) pairs by expert, compute in runs, put back."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

EXPERTS, TOP_K = 4, 2


class Plan(NamedTuple):
    order: Tensor  # [N k], positions in the flat list of choices, sorted by expert
    counts: list[int]  # of each expert
    weights: Tensor  # [N k], in that order


class Router(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids [N, k]."""
        probabilities = self.gate(tokens).softmax(-1)
        best, ids = probabilities.topk(TOP_K, -1)
        return best / best.sum(-1, keepdim=True), ids

    def plan(self, tokens: Tensor) -> Plan:
        weights, ids = self.choose(tokens)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        return Plan(order, flat.bincount(minlength=EXPERTS).tolist(), weights.flatten()[order])


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SortedMixture(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = Router(width)
        self.experts = nn.ModuleList([Expert(width, inner) for _ in range(EXPERTS)])

    def owners(self, order: Tensor, tokens: int) -> Tensor:
        """To which token each choice goes back."""
        return order // TOP_K

    def permute(self, tokens: Tensor, plan: Plan) -> Tensor:
        return tokens[plan.order // TOP_K]

    def unpermute(self, results: Tensor, plan: Plan, tokens: Tensor) -> Tensor:
        out = torch.zeros_like(tokens, dtype=results.dtype)
        return out.index_add(0, self.owners(plan.order, len(tokens)), results)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        plan = self.router.plan(tokens)
        runs = self.permute(tokens, plan).split(plan.counts)
        results = torch.cat([expert(run) for expert, run in zip(self.experts, runs, strict=True)])
        return self.unpermute(results * plan.weights[:, None].to(results.dtype), plan, tokens).view(x.shape)


class ColumnMixture(SortedMixture):
    def owners(self, order: Tensor, tokens: int) -> Tensor:
        """To which token each choice goes back."""
        return order % tokens


def weights_of(model: SortedMixture, x: Tensor) -> Tensor:
    best, ids = model.router.choose(x)
    return torch.zeros(*x.shape[:-1], EXPERTS, dtype=best.dtype, device=x.device).scatter(-1, ids, best)


def subject(cls: type[SortedMixture]) -> Subject:
    return Subject(
        kind="feed_forward",
        name=cls.__name__,
        build=lambda c: cls(c.d_model, c.d_ff),
        forward=lambda model, x: model(x),
        router=weights_of,
        declares={"activation": "swiglu", "bias": False, "norm_topk_prob": True, "structure": "other"},
    )


right, wrong = subject(SortedMixture), subject(ColumnMixture)

WHAT = "When the experts' results are added back, the token of a sorted choice is order % N though choices are flattened as [N, k] (order // k)."
CAUSE = (
    "In unpermute the index of the token assumes a choice-major layout [k, N] of the flat list, gathering takes the token-major "
    "one: what an expert made of one token is added to another, so a token's output depends on other tokens."
)
