"""Which part of a model has a wrong gradient by itself; what is kept from an earlier call, or computed anew wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
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
    hooks = (part.register_forward_pre_hook(note(name), with_kwargs=True) for name, part in parts)
    with hooked(hooks), torch.no_grad():
        run()
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


class Called:
    """Notes the parts of a model that are called while it is entered, each once for every call."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> list[str]:
        names: list[str] = []

        def note(name: str) -> Callable[..., None]:
            return lambda *_: names.append(name)

        if isinstance(self._module, nn.Module):
            self._hooks = [m.register_forward_pre_hook(note(n)) for n, m in self._module.named_modules()]
        return names

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def outermost(names: list[str]) -> list[str]:
    """Return the names, each once, that are within no other one."""
    once = [name for name in dict.fromkeys(names) if name]
    return [name for name in once if not any(name.startswith(f"{other}.") for other in once)]


def computed_again(made: Setting) -> str | None:
    """Say that a backward which computes parts again (checkpointing) takes others than the forward called."""
    with Called(made.built.module) as forward:
        value = made.value()
    with Called(made.built.module) as backward:
        made.gradients(value=value)
    often = {name: backward.count(name) - forward.count(name) for name in outermost(backward)}
    taken = [name for name, more in often.items() if more > 0]
    alike = {name.rpartition(".")[0] for name in taken}
    left = [n for n in outermost([n for n in forward if n]) if n.rpartition(".")[0] in alike and n not in backward]
    if not taken or not left:
        return None
    return (
        f"the backward computes {', '.join(taken)} again in the place of {', '.join(left[:3])}, which the forward "
        "called: what is checkpointed looks its part up when it runs (a lambda in a loop sees the last one), not when "
        "it is made"
    )


def weight_normed(module: Any) -> str | None:
    """Say that second derivatives of torch's weight_norm are wrong, where a model has it and they are."""
    if not isinstance(module, nn.Module):
        return None
    normed = [
        name.partition(".parametrizations")[0]
        for name, part in module.named_modules()
        if type(part).__name__ == "_WeightNorm" or hasattr(part, "weight_g")
    ]
    v, g = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)
    rows = (v.requires_grad_(), g.requires_grad_())
    twice = normed and torch.autograd.gradgradcheck(
        lambda v, g: torch._weight_norm(v, g, 0), rows, raise_exception=False
    )
    if not normed or twice:
        return None
    return (
        f"torch's weight_norm ({normed[0]}) has no right second derivative in torch {torch.__version__.split('+')[0]}: "
        "it holds the norms constant (declare once_differentiable=True if no second gradient is taken)"
    )
