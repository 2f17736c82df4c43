"""Which experts have a part in what comes out for a token: told by changing their weights; part of `router.weights`."""

from __future__ import annotations

from collections.abc import Callable

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
    experts, stacked = _owned(built.module, told.shape[1])
    if not experts and not stacked:
        case.does_not_apply("no mixture of as many experts as its router weighs was recognised")
    parts = case.apply(parts_of, built.module, experts, stacked, told.shape[1], run)
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


def _owned(module: nn.Module, count: int) -> tuple[str, list[str]]:
    """Return the list of modules that experts are, or the names of the tensors that their matrices are stacked in."""
    listed = [name for name, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(listed) == 1:
        return listed[0], []
    return "", [name for name, p in module.named_parameters() if p.ndim > 2 and len(p) == count]


def parts_of(module: nn.Module, experts: str, stacked: list[str], count: int, run: Callable[[], Tensor]) -> Tensor:
    """Return bool `[N, E]`: whether what comes out for a token is another where an expert's weights are others.

    Args:
        module: that mixes them.
        experts: name of the list of modules that they are; "" where they are stacked.
        stacked: names of the tensors `[E, *]` that they are stacked in.
        count: E.
        run: calls it.
    """
    before, columns = run().detach(), []
    for number in range(count):
        with torch.no_grad(), restored(module):
            if experts:
                tensors = [p.data for p in module.get_submodule(f"{experts}.{number}").parameters()]
            else:
                tensors = [module.get_parameter(name).data[number] for name in stacked]
            for tensor in tensors:
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
