"""By what each token's experts are weighted inside a module, told by what comes out; part of `router.weights`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Mixture:
    """One call of a module that mixes experts.

    Attributes:
        place: its path.
        gates: `[N, E]`: by which each token takes what each expert gives; 0 where it does not.
        scores: `[N, E]`: what the router's linear map gives.
        lost: bool `[N, E]`: which experts are called on a token, while others are not, and have no weight in it.
    """

    place: str
    gates: Tensor
    scores: Tensor
    lost: Tensor


def mixtures(module: nn.Module, run: Callable[[], object]) -> list[Mixture]:
    """Return the mixtures of experts that a forward calls, each measured on the tokens that reach it.

    A module that holds a list of like modules and a linear map to as many scores is called again on what it was given,
    while one expert gives ones and all others zeros: what comes out is that expert's weight. Modules of which that is
    not so (a norm behind the sum, experts that are mixed otherwise) are left out.

    Args:
        module: in eval mode.
        run: calls it.
    """
    known = dict(_candidates(module))
    taken: dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.setdefault(name, (args, kwargs))  # of the first call

        return hook

    handles = [part.register_forward_pre_hook(note(name), with_kwargs=True) for name, (part, _, _) in known.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    found = (_measured(name, *known[name], *taken[name]) for name in known if name in taken)
    return [one for one in found if one is not None]


def _candidates(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, nn.ModuleList, nn.Linear]]]:
    for name, part in module.named_modules():
        for experts in part.children():
            if not isinstance(experts, nn.ModuleList) or len(experts) < 2 or len({type(e) for e in experts}) > 1:
                continue
            inside = {id(m) for m in experts.modules()}
            routers = [m for m in part.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
            routers = [m for m in routers if m.out_features == len(experts)]
            if len(routers) == 1:
                yield name, (part, experts, routers[0])


def _measured(
    name: str,
    part: nn.Module,
    experts: nn.ModuleList,
    router: nn.Linear,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Mixture | None:
    scores: list[Tensor] = []
    handle = router.register_forward_hook(lambda _, given, made: scores.append(made.detach()))
    try:
        with torch.no_grad():
            with _noting(experts) as given:
                base = _output(part, experts, None, args, kwargs)
            rows = [_output(part, experts, number, args, kwargs) - base for number in range(len(experts))]
    except Exception:  # it is called with more than tokens, or its experts give more than one tensor
        return None
    finally:
        handle.remove()
    apart = max(float((row - row[..., :1]).abs().max()) for row in rows)
    gates = torch.stack([row[..., 0].flatten() for row in rows], dim=1).double()
    told = scores[0].double().reshape(-1, len(experts))
    if apart > 1e-6 or told.shape != gates.shape or not bool(gates.any()):
        return None
    return Mixture(name, gates, told, _called(args, given, gates) & (gates == 0))


def _called(args: tuple[Any, ...], given: list[list[Tensor]], gates: Tensor) -> Tensor:
    """Return bool `[N, E]`: which experts are called on which tokens, by the numbers of these; none where all are.

    Experts that take all tokens, of which a weight of 0 leaves out most, waste time and lose nothing.
    """
    called = torch.zeros_like(gates, dtype=torch.bool)
    tokens = args[0].detach().flatten(0, -2) if args and isinstance(args[0], Tensor) else None
    if tokens is None or len(tokens) != len(gates):
        return called
    for number, calls in enumerate(given):
        for rows in calls:
            if rows.shape[-1] == tokens.shape[-1]:
                called[:, number] |= (tokens[:, None] == rows.flatten(0, -2)[None]).all(-1).any(1)
    return called & ~called.all(1, keepdim=True)


@contextmanager
def _noting(experts: nn.ModuleList) -> Iterator[list[list[Tensor]]]:
    """Note what each expert is given."""
    seen: list[list[Tensor]] = [[] for _ in experts]

    def hook(number: int) -> Callable[..., None]:
        return lambda _, given: seen[number].extend(x.detach() for x in given[:1] if isinstance(x, Tensor))

    handles = [e.register_forward_pre_hook(hook(at)) for at, e in enumerate(experts)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _output(
    part: nn.Module, experts: nn.ModuleList, number: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    with _constant(experts, number):
        output = part(*args, **kwargs)
    tensor = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(tensor, Tensor) or tensor.ndim < 2:
        raise TypeError(f"it gave a {type(tensor).__name__}")
    return tensor


@contextmanager
def _constant(experts: nn.ModuleList, number: int | None) -> Iterator[None]:
    """Let one expert give ones and the others zeros."""

    def hook(value: float) -> Callable[..., Tensor]:
        return lambda _, given, made: torch.full_like(made, value)

    handles = [e.register_forward_hook(hook(float(at == number))) for at, e in enumerate(experts)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def misfit_of_ratios(mixture: Mixture) -> tuple[float, int]:
    """Return how far weights are from going by their scores, as factors, and the token where it is farthest.

    Of two experts that a token takes the weights stand as the probabilities of the scores do, by a softmax or by
    sigmoids, whether they were divided by their sum or not. Infinite where a weight is negative, or an expert's answer
    for a token is lost.
    """
    gates, scores = mixture.gates, mixture.scores
    chosen = gates != 0
    if bool((gates < 0).any()):
        return float("inf"), int((gates < 0).any(1).nonzero()[0])
    if bool(mixture.lost.any()):
        return float("inf"), int(mixture.lost.any(1).nonzero()[0])
    best = (float("inf"), 0)
    for logs in (scores, torch.nn.functional.logsigmoid(scores)):
        off = torch.where(chosen, gates.clamp(min=1e-300).log() - logs, torch.nan)
        middle = off.nan_to_num(0.0).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp(min=1)
        apart = (off - middle).nan_to_num(0.0).abs().amax(1)
        best = min(best, (float(apart.max()), int(apart.argmax())))
    return best
