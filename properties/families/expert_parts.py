"""Which experts have a part in what comes out for a token: told by changing their weights; part of `router.weights`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.bench.noise import restored
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case

LARGEST = 1e-3
"""Difference of weights that is rounding: weights of 1e-3 made in float32 are right to 1e-4."""

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
    weights = case.ask("router", x, built=built).detach().flatten(0, -2)
    told = weights != 0
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
        cause=lambda: _put_back_otherwise(parts, weights) or overwritten(parts, told),
    )
    shares = case.apply(shares_of, built.module, stacked, told.shape[1], run) if stacked else None
    if shares is None or not bool(shares.isfinite().all()):
        return
    due = weights.double() / weights.double().sum(-1, keepdim=True)
    case.close(
        shares,
        due,
        "experts are not mixed by the weights that its router gives",
        bound=LARGEST,
        constants_allowed=True,
        cause=lambda: exchanged(shares, due),
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


def shares_of(module: nn.Module, stacked: list[str], count: int, run: Callable[[], Tensor]) -> Tensor:
    """Return `[N, E]`: the share that each expert has in what comes out for a token; NaN where that is not seen.

    All experts are given the weights of the first. What comes out is then what that one makes, and it grows by half of
    an expert's share where the last matrix of that expert grows by half.

    Args:
        module: that mixes them.
        stacked: names of the tensors `[E, *]` of their matrices; one of them is the last, with biases as long or none.
        count: E.
        run: calls it.
    """
    with torch.no_grad(), restored(module):
        # those of experts are `[E, *]`: a number for each expert is the router's own bias
        tensors = {name: p.data for name, p in module.named_parameters() if p.ndim > 1 and len(p) == count}
        for name in stacked:
            tensors[name][:] = tensors[name][:1].clone()
        biases = [name for name in tensors if name not in stacked and name.endswith("bias")]
        for name in biases:
            tensors[name][:] = tensors[name][:1].clone()
        before = run().detach().flatten(0, -2)
        size = before.square().sum(-1)
        for names in [[name] for name in stacked] + [[one, two] for one in stacked for two in biases]:
            shares = []
            for number in range(count):
                for name in names:
                    tensors[name][number] *= _CHANGED
                grown = run().detach().flatten(0, -2) - before
                for name in names:
                    tensors[name][number] /= _CHANGED
                share = (grown * before).sum(-1) / size
                if float((grown - share[:, None] * before).abs().max()) > LARGEST * float(before.abs().max()):
                    break
                shares.append(share.double() / (_CHANGED - 1))
            if len(shares) == count and float((sum(shares) - 1).abs().max()) < LARGEST:  # type: ignore[union-attr]
                return torch.stack(shares, dim=1)
    return torch.full((1, 1), torch.nan)


def exchanged(gates: Tensor, told: Tensor) -> str | None:
    """Say that the experts of a token have the router's weights among them, and not each its own.

    Args:
        gates: `[N, E]`: by what each is weighted.
        told: `[N, E]`: by what it should be.
    """
    off = (gates - told).abs().amax(1) > LARGEST
    if float((gates.sort(1).values - told.sort(1).values).abs().max()) > LARGEST or not bool(off.any()):
        return None
    same = bool(((gates.abs() > LARGEST) == (told != 0)).all())
    which = "exchanged among its experts" if same else "given to other experts than the router chose"
    rule = ""
    if same and bool((off == _falls(told)).all()):
        rule = (
            ": those whose better expert has the larger number, as where experts are sorted and their weights are not"
        )
    return f"for {int(off.sum())} of {len(told)} tokens the weights are {which}{rule}"


def _falls(told: Tensor) -> Tensor:
    """Return the tokens whose chosen experts, by number, have weights that do not fall from one to the next."""
    rows = [row[row != 0] for row in told]
    return torch.tensor([bool((row.diff() > 0).any()) for row in rows], device=told.device)


def overwritten(parts: Tensor, told: Tensor) -> str | None:
    """Say that of a token's experts the last one alone has a part in it, or that some have none."""
    if not bool((parts <= told).all()):
        return "tokens are given what experts made that the router did not choose for them"
    if bool((parts.sum(1) == 1).all()):
        places = torch.arange(told.shape[1], device=told.device) * told
        which = ", the one that is called last" if bool((parts.int().argmax(1) == places.argmax(1)).all()) else ""
        return f"of the experts that a token is given to one alone has a part in it{which}: they overwrite one another"
    return "of the experts that a token is given to some have no part in it: they overwrite one another, or are dropped"


def _put_back_otherwise(parts: Tensor, weights: Tensor) -> str | None:
    """Say in which order the rows of sorted experts come back, where it is not that in which they were.

    Args:
        parts: `[N, E]` bool: which experts have a part in a token.
        weights: `[N, E]`: by what the router mixes them; a token's best expert is its first.
    """
    several = int((weights != 0).sum(1).max())
    slots = weights.topk(several, dim=1).indices.flatten()
    order = slots.argsort(stable=True)
    for back, words in (
        (order, "by the order that they were sorted in, in place of its inverse"),
        (torch.arange(len(order), device=order.device), "in the order of the experts: they are not put back at all"),
    ):
        got = torch.zeros_like(parts).scatter(1, slots[order][back].view(-1, several), True)
        if torch.equal(got, parts):
            return f"rows that are sorted by their expert are taken back {words}"
    return None


def _words(parts: Tensor, told: Tensor) -> str:
    odd = int((parts != told).any(1).int().argmax())
    return (
        f"experts {parts[odd].nonzero().flatten().tolist()} where {told[odd].nonzero().flatten().tolist()} have weights"
    )
