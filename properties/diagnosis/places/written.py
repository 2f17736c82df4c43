"""Parts of a model that change what they are given, in place: the stream that goes past them changes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.inputs import ordinary


def written_opinion(case: Case, problem: Violation) -> str | None:
    """Name the innermost part that changes its input, where there is one."""
    del problem
    built = case.bench.pool.fresh(case.config(), torch.float32)
    if not isinstance(built.module, nn.Module):
        return None
    inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(2), built.dtype)
    given: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
    changed: list[str] = []

    def before(part: nn.Module, args: tuple[Any, ...]) -> None:
        given.setdefault(part, []).extend(
            (x, x.detach().clone()) for x in args if isinstance(x, Tensor) and x.is_floating_point()
        )

    def behind(name: str) -> Callable[..., None]:
        def look(part: nn.Module, args: Any, output: Any) -> None:
            if any(not torch.equal(x, was) for x, was in given.pop(part, [])):
                changed.append(f"{name} ({type(part).__name__})")

        return look

    parts = [(name, part) for name, part in built.module.named_modules() if name]
    hooks = [part.register_forward_pre_hook(before) for _, part in parts]
    hooks += [part.register_forward_hook(behind(name)) for name, part in parts]
    with hooked(hooks), torch.no_grad():
        case.call(built, *(x.to(case.bench.device) for x in inputs.tensors), *inputs.extras)
    if not changed:
        return None
    return f"{changed[0]} changes what it is given, in place: the stream that goes past it is changed with it"
