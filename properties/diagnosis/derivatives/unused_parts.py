"""Parameters that no output depends on: never called, or called and what they give is put aside, or cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.causes.asking import answer_to
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.derivatives.differentiating import Setting, Sizes, setting
from veriformer.properties.diagnosis.derivatives.gradient_parts import kept_from_an_earlier_call
from veriformer.properties.diagnosis.derivatives.gradients import wrong_gradient
from veriformer.properties.engine.case import Case


@dataclass
class _Called:
    """One call of a part: what it got and what it gave."""

    name: str
    part: nn.Module
    got: list[Tensor]
    gave: list[Tensor]


def why_not_connected(case: Case, lost: list[str]) -> str | None:
    """Say why parameters are not connected to the output.

    Args:
        case: of the failure.
        lost: their names.
    """
    with off_the_record(case):
        return answer_to(lambda: _why_not_connected(case, lost))


def _why_not_connected(case: Case, lost: list[str]) -> str | None:
    made = setting(case, Sizes(batch=2, queries=5, keys=7, heads=3))
    if _matter(made, lost) or kept_from_an_earlier_call(case):
        return wrong_gradient(case)
    return _unused(made, lost)


def _matter(made: Setting, names: list[str]) -> bool:
    """Whether the output changes with parameters."""
    with torch.no_grad():
        before = made.output().clone()
        for name in names:
            if name in made.leaves:
                leaf = made.leaves[name]
                leaf.add_(torch.linspace(0.3, 1.0, leaf.numel(), dtype=leaf.dtype).view(leaf.shape).to(leaf.device))
        after = made.output()
    return float((after - before).abs().max()) > 1e-9 * size_of(before)


def _unused(made: Setting, lost: list[str]) -> str | None:
    module = made.built.module
    calls = _calls(module, made.run)
    parts = dict(module.named_modules())
    whole = [
        name
        for name, part in parts.items()
        if name
        and (own := [f"{name}.{n}" for n, _ in part.named_parameters()])
        and set(own) <= set(lost)
        and not isinstance(part, nn.ModuleList | nn.ModuleDict)
    ]
    outer = [n for n in whole if not any(n.startswith(f"{o}.") for o in whole)]
    if not outer:
        return None
    called = [c for c in calls if c.name in outer]
    never = [n for n in outer if not any(c.name == n or c.name.startswith(f"{n}.") for c in calls)]
    told = ""
    if never or not called:
        named = f"{', '.join(f'{n} ({type(parts[n]).__name__})' for n in (never or outer)[:3])}"
        twin = _called_instead(calls, parts, (never or outer)[0])
        told = f"{named} {'is' if len(never or outer) == 1 else 'are'} never called{twin}"
    if not called:
        return told
    last = called[-1]
    names = f"{last.name} ({type(last.part).__name__})"
    many = f"{called[0].name} to {names} are" if len({c.name for c in called}) > 1 else f"{names} is"
    after = calls[calls.index(last) + 1 :]
    reader = _reader(after, called)
    instead = f": {reader} is given what {called[0].name} gets, not what {last.name} gives" if reader else ""
    return f"{told}{'; ' if told else ''}{many} called, and nothing uses the result{'' if told else instead}"


def _called_instead(calls: list[_Called], parts: dict[str, nn.Module], name: str) -> str:
    """Name a part of the same form, beside one that is never called, that is called in its place too."""
    beside, often = name.rpartition(".")[0], ""
    for other in dict.fromkeys(c.name for c in calls):
        mine = [c for c in calls if c.name == other]
        is_twin = other.rpartition(".")[0] == beside and type(parts[other]) is type(parts[name])
        if is_twin and len(mine) > 1 and _same(mine[0].got, mine[1].got):
            return f"; {other} is called twice on the same input, once in its place"
        if is_twin and len(mine) == 2:
            often = often or f"; {other} is called twice, on two inputs: once in its place"
        if is_twin and len(mine) > 1 and len(mine) == len(_beside(parts, other)) and other == _beside(parts, other)[-1]:
            return (
                f"; {other}, the last beside it, is called {len(mine)} times, once for each: a function made in a "
                "loop that looks its part up when it runs finds the last one, or an index that does not move"
            )
    return often


def _beside(parts: dict[str, nn.Module], name: str) -> list[str]:
    """Return the names of the parts of one form that stand beside one another, in order."""
    owner, kind = name.rpartition(".")[0], type(parts[name])
    return [n for n, part in parts.items() if n.rpartition(".")[0] == owner and type(part) is kind]


def _reader(after: list[_Called], lost: list[_Called]) -> str:
    """Name the first part behind what is lost that gets the very tensor that this got."""
    names = {c.name for c in lost}
    for call in after:
        if call.name in names or any(call.name.startswith(f"{n}.") for n in names):
            continue
        if any(x is y or (x.shape == y.shape and torch.equal(x, y)) for x in call.got for y in lost[0].got[:1]):
            return f"{call.name} ({type(call.part).__name__})" if call.name else ""
    return ""


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    if not one or len(one) != len(two):
        return False
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(one, two, strict=True))


def _calls(module: nn.Module, run: Callable[[], object]) -> list[_Called]:
    """Return the calls of all parts, in the order in which they end."""
    found: list[_Called] = []

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.append(_Called(name, part, list(_tensors((args, kwargs))), list(_tensors(output))))

        return hook

    hooks = (part.register_forward_hook(note(name), with_kwargs=True) for name, part in module.named_modules())
    with hooked(hooks), torch.no_grad():
        run()
    return [c for c in found if c.name]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
