"""Which part of a model has a wrong gradient by itself; and what is kept from an earlier call and used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.derivatives.differentiating import Setting, Sizes, setting
from veriformer.properties.diagnosis.derivatives.gradient_formulas import told_by_formula
from veriformer.properties.engine.case import Case

_MOST = 80  # parts of a model that are looked at


def wrong_part(case: Case, made: Setting) -> str | None:
    """Name the innermost part whose gradient, taken by itself, is not the derivative of what it gives."""
    module = made.built.module
    if not isinstance(module, nn.Module):
        return None
    calls = _calls(module, made.run)
    for name, part, args, kwargs in sorted(calls, key=lambda call: -call[0].count("."))[:_MOST]:
        if not name or isinstance(part, nn.Embedding):
            continue
        alone = _alone(made, part, args, kwargs)
        try:
            if alone is None or alone.is_right():
                continue
        except Exception:  # it gives no single tensor, say
            continue
        told = ""
        gradient = alone.gradients().get("the input")
        if gradient is not None and isinstance(args[0], Tensor) and args[0].ndim == 3:
            told = told_by_formula(case, alone, "the input", gradient, "norm") or ""
        is_whole = f"it is the gradient of {name} ({type(part).__name__}) that is wrong, called by itself too"
        return f"{is_whole}: {told}" if told else is_whole
    return None


Call = tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]


def _calls(module: nn.Module, run: Callable[[], object]) -> list[Call]:
    """Return the first call of each part."""
    found: dict[str, Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            found.setdefault(name, (name, part, args, kwargs))

        return hook

    parts = [(n, p) for n, p in module.named_modules() if not isinstance(p, nn.ModuleList | nn.ModuleDict)]
    hooks = [part.register_forward_pre_hook(note(name), with_kwargs=True) for name, part in parts]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _alone(made: Setting, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Setting | None:
    """Return a part called by itself on what it got."""
    given = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
    leaves: dict[str, Tensor] = {}
    for number, x in enumerate(given):
        if isinstance(x, Tensor) and x.is_floating_point():
            leaves["the input" if number == 0 else f"input {number}"] = x.requires_grad_()
    inputs = len(leaves)
    leaves |= {n: p for n, p in part.named_parameters() if p.is_floating_point() and p.requires_grad}
    if not leaves:
        return None
    return Setting(made.built, lambda: part(*given, **kwargs), leaves, inputs, {})


def kept_from_an_earlier_call(case: Case) -> str | None:
    """Say that something made in one call is used again in the next, whose parameters or inputs are others."""
    sizes = Sizes(batch=2, queries=4, keys=6)
    for what in ("parameters", "inputs"):
        used, new = setting(case, sizes), setting(case, sizes)
        if what == "parameters" and len(used.leaves) == used.inputs:
            continue
        before = [x.detach().clone() for x in used.args]
        first = _parts_called(used)
        if not torch.equal(used.output(), used.output()):
            return None  # it draws numbers of its own, or counts its calls
        if not all(torch.equal(x, y) for x, y in zip(used.args, before, strict=True)):
            return None  # the call changes what it is given
        for made in (used, new):
            _change(case, made, what)
        again = _parts_called(used)
        late, fresh = used.output(), new.output()
        if late.shape != fresh.shape or float((late - fresh).abs().max()) <= 1e-6 * size_of(fresh):
            continue
        skipped = [name for name in first if name and name not in again]
        outer = [n for n in skipped if not any(n.startswith(f"{o}.") for o in skipped)]
        told = (
            f"; {', '.join(outer[:3])} {'is' if len(outer) == 1 else 'are'} not called a second time" if outer else ""
        )
        return (
            f"what an earlier call made is kept and used again, though the {what} have changed since: "
            f"a new model with the same {what} gives another output{told}"
        )
    return None


def _parts_called(made: Setting) -> list[str]:
    if not isinstance(made.built.module, nn.Module):
        made.run()
        return []
    return [name for name, *_ in _calls_with_grad(made)]


def _calls_with_grad(made: Setting) -> list[Call]:
    found = _calls(made.built.module, made.run)
    with torch.enable_grad():
        made.run()
    return found


def _change(case: Case, made: Setting, what: str) -> None:
    """Move the parameters, or put other inputs in the place of those that are there."""
    with torch.no_grad():
        if what == "parameters":
            for name in list(made.leaves)[made.inputs :]:
                leaf, generator = made.leaves[name], torch.Generator().manual_seed(1)
                leaf.add_(torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device), alpha=0.3)
            return
        for x in made.args:
            if x.is_floating_point():
                x.copy_(x.flip(0) * 0.7 + 0.1)
            elif case.subject.takes_tokens:
                x.copy_((x + 1) % made.built.config.vocab_size)
