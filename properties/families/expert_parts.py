"""Which experts have a part in what comes out for a token: told by changing their weights; part of `router.weights`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from veriformer.properties.bench.noise import restored
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case

_CHANGED = 1.5
"""By what an expert's weights are multiplied: what it gives is another, whatever the activation between them."""


def every_chosen_expert_has_a_part(case: Case, built: Built, x: Tensor, run: Callable[[], Tensor]) -> None:
    """Require that the output of a token depends on the weights of the experts that `router` gives it, and no others.

    Args:
        case: of a subject with a `router`.
        built: a mixture whose experts are stacked in tensors `[E, *]`, or in a list of modules.
        x: `[B, T, D]`.
        run: calls it on that.
    """
    told = case.ask("router", x, built=built).detach().flatten(0, -2) != 0
    experts = list(_owned(built.module, told.shape[1], lambda: case.ask("router", x, built=built)))
    if not experts:
        case.does_not_apply("no mixture of as many experts as its router weighs was recognised")
    parts = case.apply(parts_of, built.module, experts, run)
    if parts.shape != told.shape:
        case.does_not_apply("it gives another number of tokens than it was given")
    case.witness()
    case.require(
        (parts == told).all(),
        "the output of a token depends on other experts than its router weighs",
        got=_words(parts, told),
        expected="of each token the experts that have a weight, and no other",
        cause=lambda: overwritten(parts, told),
    )


def _owned(module: nn.Module, count: int, router: Callable[[], Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters, or slices of stacked ones, of each expert: those that the router's weights do not go by."""
    listed = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(listed) == 1:
        yield from ([p.data for p in expert.parameters()] for expert in listed[0])
        return
    stacked = [p for p in module.parameters() if p.ndim > 1 and len(p) == count]
    before = router()
    own = []
    for parameter in stacked:
        with torch.no_grad(), restored(module):
            parameter.data[: count // 2] *= _CHANGED
            if torch.equal(router(), before):
                own.append(parameter)
    for number in range(count) if own else ():
        yield [parameter.data[number] for parameter in own]


def parts_of(module: nn.Module, experts: list[list[Tensor]], run: Callable[[], Tensor]) -> Tensor:
    """Return bool `[N, E]`: whether what comes out for a token is another where an expert's weights are others."""
    before = run().detach()
    columns = []
    for expert in experts:
        with torch.no_grad(), restored(module):
            for tensor in expert:
                tensor *= _CHANGED
            columns.append((run().detach() != before).flatten(0, -2).any(-1))
    return torch.stack(columns, dim=1)


def overwritten(parts: Tensor, told: Tensor) -> str | None:
    """Say that of a token's experts the last one alone has a part in it, or that some have none."""
    if not bool((parts <= told).all()):
        return "tokens are given what experts made that the router did not choose for them"
    if bool((parts.sum(1) == 1).all()):
        places = torch.arange(told.shape[1], device=told.device) * told
        which = ", the one that is called last" if bool((parts.int().argmax(1) == places.argmax(1)).all()) else ""
        return f"of the experts that a token is given to one alone has a part in it{which}: they overwrite one another"
    return "of the experts that a token is given to some have no part in it: they overwrite one another, or are dropped"


def _words(parts: Tensor, told: Tensor) -> str:
    odd = int((parts != told).any(1).int().argmax())
    return (
        f"experts {parts[odd].nonzero().flatten().tolist()} where {told[odd].nonzero().flatten().tolist()} have weights"
    )
